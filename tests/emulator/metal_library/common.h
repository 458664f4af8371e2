// <metal_common>, <metal_relational>, <metal_integer>, <metal_geometric>.
// Minimum, maximum and clamp take one type for all arguments: a mix is as ambiguous here as it is in Metal.
#pragma once
#include "elementary.h"

namespace metal {

#define EMU_ORDER(T)                                                                  \
  EMU_INLINE constexpr T max(T a, T b) { return a < b ? b : a; }                      \
  EMU_INLINE constexpr T min(T a, T b) { return b < a ? b : a; }                      \
  EMU_INLINE constexpr T clamp(T x, T low, T high) { return min(max(x, low), high); } \
  EMU_INLINE constexpr T max3(T a, T b, T c) { return max(a, max(b, c)); }            \
  EMU_INLINE constexpr T min3(T a, T b, T c) { return min(a, min(b, c)); }
#define EMU_SIGNED(T) \
  EMU_ORDER(T)        \
  EMU_INLINE constexpr T abs(T x) { return x < 0 ? T(-x) : x; }
#define EMU_UNSIGNED(T) \
  EMU_ORDER(T)          \
  EMU_INLINE constexpr T abs(T x) { return x; }
EMU_SIGNED(char)
EMU_SIGNED(int8_t)
EMU_SIGNED(short)
EMU_SIGNED(int)
EMU_SIGNED(long)
EMU_UNSIGNED(uint8_t)
EMU_UNSIGNED(ushort)
EMU_UNSIGNED(uint)
EMU_UNSIGNED(ulong)
#undef EMU_ORDER
#undef EMU_SIGNED
#undef EMU_UNSIGNED

// A NaN loses against a number.
#define EMU_FLOATING(T)                                                             \
  EMU_INLINE T max(T a, T b) { return a != a ? b : b != b ? a : a < b ? b : a; }    \
  EMU_INLINE T min(T a, T b) { return a != a ? b : b != b ? a : b < a ? b : a; }    \
  EMU_INLINE T clamp(T x, T low, T high) { return min(max(x, low), high); }         \
  EMU_INLINE T max3(T a, T b, T c) { return max(a, max(b, c)); }                    \
  EMU_INLINE T min3(T a, T b, T c) { return min(a, min(b, c)); }                    \
  EMU_INLINE T median3(T a, T b, T c) { return max(min(a, b), min(max(a, b), c)); } \
  EMU_INLINE T saturate(T x) { return clamp(x, T(0), T(1)); }                       \
  EMU_INLINE T mix(T a, T b, T t) { return a + (b - a) * t; }                       \
  EMU_INLINE T sign(T x) { return x > T(0) ? T(1) : x < T(0) ? T(-1) : T(0); }      \
  EMU_INLINE T step(T edge, T x) { return x < edge ? T(0) : T(1); }                 \
  EMU_INLINE T smoothstep(T a, T b, T x) {                                          \
    T t = saturate((x - a) / (b - a));                                              \
    return t * t * (T(3) - T(2) * t);                                               \
  }                                                                                 \
  EMU_INLINE T abs(T x) { return T(__builtin_fabsf(float(x))); }                    \
  EMU_INLINE T divide(T a, T b) { return a / b; }                                   \
  EMU_INLINE bool isnan(T x) { return x != x; }                                     \
  EMU_INLINE bool isinf(T x) { return __builtin_isinf(float(x)); }                  \
  EMU_INLINE bool isfinite(T x) { return __builtin_isfinite(float(x)); }            \
  EMU_INLINE bool isnormal(T x) { return __builtin_isnormal(float(x)); }            \
  EMU_INLINE bool signbit(T x) { return __builtin_signbit(float(x)); }
EMU_FLOATING(float)
EMU_FLOATING(half)
#undef EMU_FLOATING

EMU_INLINE bool isnan(bfloat x) { return float(x) != float(x); }
EMU_INLINE bool isinf(bfloat x) { return __builtin_isinf(float(x)); }
EMU_INLINE bool isfinite(bfloat x) { return __builtin_isfinite(float(x)); }

#define EMU_MODE(mode) \
  namespace mode {     \
  using metal::abs;    \
  using metal::clamp;  \
  using metal::divide; \
  using metal::isnan;  \
  using metal::max;    \
  using metal::min;    \
  }
EMU_MODE(precise)
EMU_MODE(fast)
#undef EMU_MODE

template <class T, int N> EMU_INLINE vec<T, N> max(vec<T, N> a, const vec<T, N>& b) {
  for (int i = 0; i < N; i++) a.data[i] = max(a.data[i], b.data[i]);
  return a;
}
template <class T, int N> EMU_INLINE vec<T, N> min(vec<T, N> a, const vec<T, N>& b) {
  for (int i = 0; i < N; i++) a.data[i] = min(a.data[i], b.data[i]);
  return a;
}
template <class T, int N>
EMU_INLINE vec<T, N> clamp(vec<T, N> x, const vec<T, N>& low, const vec<T, N>& high) {
  return min(max(x, low), high);
}
template <class T, int N> EMU_INLINE vec<T, N> abs(vec<T, N> a) {
  for (int i = 0; i < N; i++) a.data[i] = abs(a.data[i]);
  return a;
}
template <class T, int N> EMU_INLINE vec<bool, N> isnan(const vec<T, N>& a) {
  vec<bool, N> r;
  for (int i = 0; i < N; i++) r.data[i] = isnan(a.data[i]);
  return r;
}
template <int N> EMU_INLINE bool any(const vec<bool, N>& a) {
  for (int i = 0; i < N; i++)
    if (a.data[i]) return true;
  return false;
}
template <int N> EMU_INLINE bool all(const vec<bool, N>& a) {
  for (int i = 0; i < N; i++)
    if (!a.data[i]) return false;
  return true;
}
template <class T> EMU_INLINE T select(T a, T b, bool condition) { return condition ? b : a; }
template <class T, int N>
EMU_INLINE vec<T, N> select(vec<T, N> a, const vec<T, N>& b, const vec<bool, N>& condition) {
  for (int i = 0; i < N; i++)
    if (condition.data[i]) a.data[i] = b.data[i];
  return a;
}

template <class T, int N> EMU_INLINE T dot(const vec<T, N>& a, const vec<T, N>& b) {
  T sum = T(0);
  for (int i = 0; i < N; i++) sum = sum + a.data[i] * b.data[i];
  return sum;
}
template <class T, int N> EMU_INLINE T length_squared(const vec<T, N>& a) { return dot(a, a); }
template <class T, int N> EMU_INLINE T length(const vec<T, N>& a) { return sqrt(dot(a, a)); }

template <class T, class = enable_if_t<__is_integral(T)>> EMU_INLINE T popcount(T x) {
  return T(__builtin_popcountl(ulong(make_unsigned_t<T>(x))));
}
template <class T, class = enable_if_t<__is_integral(T)>> EMU_INLINE T clz(T x) {
  const int width = 8 * int(sizeof(T));
  return x ? T(__builtin_clzl(ulong(make_unsigned_t<T>(x))) - (64 - width)) : T(width);
}
template <class T, class = enable_if_t<__is_integral(T)>> EMU_INLINE T ctz(T x) {
  return x ? T(__builtin_ctzl(ulong(x))) : T(8 * sizeof(T));
}
template <class T> EMU_INLINE T extract_bits(T x, uint offset, uint bits) {
  return T((x >> offset) & ((T(1) << bits) - 1));
}
template <class T> EMU_INLINE T absdiff(T a, T b) { return a > b ? a - b : b - a; }
EMU_INLINE int mulhi(int a, int b) { return int((long(a) * b) >> 32); }
EMU_INLINE uint mulhi(uint a, uint b) { return uint((ulong(a) * b) >> 32); }
EMU_INLINE uint reverse_bits(uint x) { return __builtin_bitreverse32(x); }
EMU_INLINE uint rotate(uint a, uint n) {
  n &= 31;
  return n ? a << n | a >> (32 - n) : a;
}

}  // namespace metal
