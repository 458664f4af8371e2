// Elementary functions of <metal_math>, computed in double and rounded once.
// fast:: adds the error that emu_inexact is set to; none by default.
#pragma once
#include "vector.h"

namespace emu {
EMU_INLINE double inverse_sqrt(double x) { return 1.0 / __builtin_sqrt(x); }
EMU_INLINE double power_of_ten(double x) { return __builtin_pow(10.0, x); }
EMU_INLINE double sin_of_pi(double x) { return __builtin_sin(3.14159265358979323846 * x); }
EMU_INLINE double cos_of_pi(double x) { return __builtin_cos(3.14159265358979323846 * x); }
EMU_INLINE double tan_of_pi(double x) { return __builtin_tan(3.14159265358979323846 * x); }
EMU_INLINE double fraction(double x) { return x - __builtin_floor(x); }
}  // namespace emu

namespace metal {

#define EMU_UNARY_FORMS(name, expression)                            \
  EMU_INLINE float name(float x) { return expression; }              \
  EMU_INLINE half name(half x) { return half(float(expression)); }   \
  template <class T, int N> EMU_INLINE vec<T, N> name(vec<T, N> v) { \
    for (int i = 0; i < N; i++) v.data[i] = name(v.data[i]);         \
    return v;                                                        \
  }
// The names with underscores are the compiler's own, which MLX's bfloat overloads call.
#define EMU_UNARY(name, function)                                            \
  namespace precise {                                                        \
  EMU_UNARY_FORMS(name, float(function(double(x))))                          \
  }                                                                          \
  namespace fast {                                                           \
  EMU_UNARY_FORMS(name, emu_inexact(float(function(double(x)))))             \
  }                                                                          \
  using precise::name;                                                       \
  EMU_INLINE float __metal_##name(float x, int) { return precise::name(x); } \
  EMU_INLINE half __metal_##name(half x, int) { return precise::name(x); }
EMU_UNARY(exp, __builtin_exp)
EMU_UNARY(exp2, __builtin_exp2)
EMU_UNARY(exp10, emu::power_of_ten)
EMU_UNARY(log, __builtin_log)
EMU_UNARY(log2, __builtin_log2)
EMU_UNARY(log10, __builtin_log10)
EMU_UNARY(sin, __builtin_sin)
EMU_UNARY(cos, __builtin_cos)
EMU_UNARY(tan, __builtin_tan)
EMU_UNARY(asin, __builtin_asin)
EMU_UNARY(acos, __builtin_acos)
EMU_UNARY(atan, __builtin_atan)
EMU_UNARY(sinh, __builtin_sinh)
EMU_UNARY(cosh, __builtin_cosh)
EMU_UNARY(tanh, __builtin_tanh)
EMU_UNARY(asinh, __builtin_asinh)
EMU_UNARY(acosh, __builtin_acosh)
EMU_UNARY(atanh, __builtin_atanh)
EMU_UNARY(sinpi, emu::sin_of_pi)
EMU_UNARY(cospi, emu::cos_of_pi)
EMU_UNARY(tanpi, emu::tan_of_pi)
EMU_UNARY(sqrt, __builtin_sqrt)
EMU_UNARY(rsqrt, emu::inverse_sqrt)
#undef EMU_UNARY

// Exact in every mode.
#define EMU_EXACT(name, function)                                            \
  namespace precise {                                                        \
  EMU_UNARY_FORMS(name, float(function(double(x))))                          \
  }                                                                          \
  namespace fast {                                                           \
  using precise::name;                                                       \
  }                                                                          \
  using precise::name;                                                       \
  EMU_INLINE float __metal_##name(float x, int) { return precise::name(x); } \
  EMU_INLINE half __metal_##name(half x, int) { return precise::name(x); }
EMU_EXACT(floor, __builtin_floor)
EMU_EXACT(ceil, __builtin_ceil)
EMU_EXACT(trunc, __builtin_trunc)
EMU_EXACT(rint, __builtin_rint)
EMU_EXACT(round, __builtin_round)
EMU_EXACT(fabs, __builtin_fabs)
EMU_EXACT(fract, emu::fraction)
#undef EMU_EXACT
#undef EMU_UNARY_FORMS

#define EMU_BINARY(name, function)                                                             \
  namespace precise {                                                                          \
  EMU_INLINE float name(float x, float y) { return float(function(double(x), double(y))); }    \
  EMU_INLINE half name(half x, half y) { return half(float(function(double(x), double(y)))); } \
  template <class T, int N> EMU_INLINE vec<T, N> name(vec<T, N> v, const vec<T, N>& w) {       \
    for (int i = 0; i < N; i++) v.data[i] = name(v.data[i], w.data[i]);                        \
    return v;                                                                                  \
  }                                                                                            \
  }                                                                                            \
  namespace fast {                                                                             \
  using precise::name;                                                                         \
  }                                                                                            \
  using precise::name;                                                                         \
  EMU_INLINE float __metal_##name(float x, float y, int) { return precise::name(x, y); }
EMU_BINARY(pow, __builtin_pow)
EMU_BINARY(powr, __builtin_pow)
EMU_BINARY(atan2, __builtin_atan2)
EMU_BINARY(fmod, __builtin_fmod)
EMU_BINARY(copysign, __builtin_copysign)
EMU_BINARY(fdim, __builtin_fdim)
EMU_BINARY(fmax, __builtin_fmax)
EMU_BINARY(fmin, __builtin_fmin)
#undef EMU_BINARY

EMU_INLINE float nextafter(float x, float y) { return __builtin_nextafterf(x, y); }

EMU_INLINE float fma(float a, float b, float c) { return __builtin_fmaf(a, b, c); }
EMU_INLINE half fma(half a, half b, half c) {
  return half(float(__builtin_fma(double(a), double(b), double(c))));
}
template <class T, int N> EMU_INLINE vec<T, N> fma(vec<T, N> a, const vec<T, N>& b, const vec<T, N>& c) {
  for (int i = 0; i < N; i++) a.data[i] = fma(a.data[i], b.data[i], c.data[i]);
  return a;
}
namespace precise {
using metal::fma;
}
namespace fast {
using metal::fma;
}

EMU_INLINE float ldexp(float x, int e) { return __builtin_ldexpf(x, e); }
EMU_INLINE half ldexp(half x, int e) { return half(__builtin_ldexpf(float(x), e)); }
EMU_INLINE float frexp(float x, int& e) { return __builtin_frexpf(x, &e); }
EMU_INLINE int ilogb(float x) { return __builtin_ilogbf(x); }
EMU_INLINE float modf(float x, float& whole) {
  whole = __builtin_truncf(x);
  return x - whole;
}

}  // namespace metal
