// An unsigned multiplier of 12 bits that multiplies the 6 bits of each operand from its leading one
// on, the lowest of them set to 1: Hashemi, Bahar and Reda, DRUM: A Dynamic Range Unbiased
// Multiplier for Approximate Applications, ICCAD 2015.
#include <stdint.h>

static uint32_t keep6(uint32_t n) {
  if (n < 64) return n;
  const int dropped = 26 - __builtin_clz(n);
  return (n >> dropped | 1) << dropped;
}

uint32_t mul12u_drum6(uint16_t a, uint16_t b) { return keep6(a) * keep6(b); }
