// A signed multiplier of 8 bits without the two lowest bits of its operands.
#include <stdint.h>

int16_t mul8s_cut(int8_t a, int8_t b) { return (a & ~3) * (b & ~3); }
