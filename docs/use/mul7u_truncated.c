// An unsigned multiplier of 7 bits without the partial products of its 8 lowest columns: every
// a_i b_j with i + j < 8 is left out. Its errors are those of all pairs of operands; its power, area
// and delay are not known.
// MAE = 384.25
// WCE = 1537
#include <stdint.h>

uint16_t mul7u_truncated(uint8_t a, uint8_t b) {
  uint16_t product = 0;
  for (int i = 0; i < 7; ++i)
    for (int j = 8 - i; j < 7; ++j) product += (a >> i & 1) * (b >> j & 1) << (i + j);
  return product;
}
