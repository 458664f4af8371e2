// bfloat: rounds to nearest even; implicit to float, explicit from float and half, no arithmetic with half.
#pragma once
#include "traits.h"

namespace metal {

struct bfloat {
  uint16_t bits;

  static EMU_INLINE constexpr uint16_t rounded(float f) {
    uint32_t u = __builtin_bit_cast(uint32_t, f);
    if ((u & 0x7fffffff) > 0x7f800000) return uint16_t((u >> 16) | 0x40);
    return uint16_t((u + 0x7fff + ((u >> 16) & 1)) >> 16);
  }

  bfloat() = default;
  explicit constexpr bfloat(float f) : bits(rounded(f)) {}
  explicit constexpr bfloat(half h) : bits(rounded(float(h))) {}
  template <class I, class = enable_if_t<__is_integral(I)>> constexpr bfloat(I i) : bits(rounded(float(i))) {}

  constexpr operator float() const { return __builtin_bit_cast(float, uint32_t(bits) << 16); }
  template <class H, class = enable_if_t<__is_same(H, half)>, int = 0> explicit constexpr operator H() const {
    return half(float(*this));
  }
  template <class I, class = enable_if_t<__is_integral(I)>, long = 0> explicit constexpr operator I() const {
    return I(float(*this));
  }
};

#define EMU_BFLOAT_ARITHMETIC(op)                                                                      \
  EMU_INLINE constexpr bfloat operator op(bfloat a, bfloat b) { return bfloat(float(a) op float(b)); } \
  template <class I, class = enable_if_t<__is_integral(I)>>                                            \
  EMU_INLINE constexpr bfloat operator op(bfloat a, I b) {                                             \
    return bfloat(float(a) op float(bfloat(b)));                                                       \
  }                                                                                                    \
  template <class I, class = enable_if_t<__is_integral(I)>>                                            \
  EMU_INLINE constexpr bfloat operator op(I a, bfloat b) {                                             \
    return bfloat(float(bfloat(a)) op float(b));                                                       \
  }                                                                                                    \
  EMU_INLINE constexpr float operator op(bfloat a, float b) { return float(a) op b; }                  \
  EMU_INLINE constexpr float operator op(float a, bfloat b) { return a op float(b); }                  \
  EMU_INLINE constexpr bfloat& operator op## = (bfloat & a, bfloat b) { return a = a op b; }           \
  EMU_INLINE constexpr bfloat& operator op## = (bfloat & a, int b) { return a = a op bfloat(b); }      \
  bfloat operator op(half, bfloat) = delete;                                                           \
  bfloat operator op(bfloat, half) = delete;
EMU_BFLOAT_ARITHMETIC(+)
EMU_BFLOAT_ARITHMETIC(-)
EMU_BFLOAT_ARITHMETIC(*)
EMU_BFLOAT_ARITHMETIC(/)
#undef EMU_BFLOAT_ARITHMETIC

EMU_INLINE constexpr bfloat operator+(bfloat a) { return a; }
EMU_INLINE constexpr bfloat operator-(bfloat a) {
  return __builtin_bit_cast(bfloat, uint16_t(a.bits ^ 0x8000));
}

#define EMU_BFLOAT_COMPARISON(op)                                                            \
  EMU_INLINE constexpr bool operator op(bfloat a, bfloat b) { return float(a) op float(b); } \
  EMU_INLINE constexpr bool operator op(bfloat a, float b) { return float(a) op b; }         \
  EMU_INLINE constexpr bool operator op(float a, bfloat b) { return a op float(b); }         \
  EMU_INLINE constexpr bool operator op(bfloat a, int b) { return float(a) op float(b); }
EMU_BFLOAT_COMPARISON(<)
EMU_BFLOAT_COMPARISON(>)
EMU_BFLOAT_COMPARISON(<=)
EMU_BFLOAT_COMPARISON(>=)
EMU_BFLOAT_COMPARISON(==)
EMU_BFLOAT_COMPARISON(!=)
#undef EMU_BFLOAT_COMPARISON

template <class T>
constexpr bool is_floating_point_v =
    __is_same(__remove_cv(T), float) || __is_same(__remove_cv(T), half) || __is_same(__remove_cv(T), bfloat);
template <class T> struct is_floating_point : bool_constant<is_floating_point_v<T>> {};
template <class T> constexpr bool is_arithmetic_v = __is_integral(T) || is_floating_point_v<T>;
template <class T> struct is_arithmetic : bool_constant<is_arithmetic_v<T>> {};

}  // namespace metal

using metal::bfloat;
