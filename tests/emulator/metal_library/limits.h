// <metal_limits>
#pragma once
#include "bfloat.h"

namespace metal {

template <class T> struct numeric_limits {
  static constexpr bool is_specialized = false;
};

#define EMU_INTEGER_LIMITS(T, MIN, MAX)                                                       \
  template <> struct numeric_limits<T> {                                                      \
    static constexpr bool is_specialized = true, is_integer = true, is_signed = T(-1) < T(0); \
    static constexpr int digits = sizeof(T) * 8 - is_signed;                                  \
    static constexpr T min() { return MIN; }                                                  \
    static constexpr T max() { return MAX; }                                                  \
    static constexpr T lowest() { return MIN; }                                               \
    static constexpr T infinity() { return 0; }                                               \
  };
EMU_INTEGER_LIMITS(bool, false, true)
EMU_INTEGER_LIMITS(char, -128, 127)
EMU_INTEGER_LIMITS(int8_t, -128, 127)
EMU_INTEGER_LIMITS(uint8_t, 0, 255)
EMU_INTEGER_LIMITS(short, -32768, 32767)
EMU_INTEGER_LIMITS(ushort, 0, 65535)
EMU_INTEGER_LIMITS(int, -2147483647 - 1, 2147483647)
EMU_INTEGER_LIMITS(uint, 0, 4294967295u)
EMU_INTEGER_LIMITS(long, -9223372036854775807l - 1, 9223372036854775807l)
EMU_INTEGER_LIMITS(ulong, 0, 18446744073709551615ul)
#undef EMU_INTEGER_LIMITS

#define EMU_FLOAT_LIMITS(T, DIGITS, MIN, MAX, EPSILON, SMALLEST)                       \
  template <> struct numeric_limits<T> {                                               \
    static constexpr bool is_specialized = true, is_integer = false, is_signed = true; \
    static constexpr int digits = DIGITS;                                              \
    static constexpr T min() { return T(MIN); }                                        \
    static constexpr T max() { return T(MAX); }                                        \
    static constexpr T lowest() { return T(-MAX); }                                    \
    static constexpr T epsilon() { return T(EPSILON); }                                \
    static constexpr T denorm_min() { return T(SMALLEST); }                            \
    static constexpr T infinity() { return T(__builtin_inff()); }                      \
    static constexpr T quiet_NaN() { return T(__builtin_nanf("")); }                   \
  };
EMU_FLOAT_LIMITS(float, 24, 0x1p-126f, 0x1.fffffep127f, 0x1p-23f, 0x1p-149f)
EMU_FLOAT_LIMITS(half, 11, 0x1p-14f, 65504.0f, 0x1p-10f, 0x1p-24f)
EMU_FLOAT_LIMITS(bfloat, 8, 0x1p-126f, 0x1.fep127f, 0x1p-7f, 0x1p-133f)
#undef EMU_FLOAT_LIMITS

}  // namespace metal
