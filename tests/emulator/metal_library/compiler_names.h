// Names of the driver's compiler itself, which MLX's bfloat overloads call.
#pragma once
#include "simdgroup_matrix.h"

namespace metal {

EMU_INLINE float __metal_fma(float a, float b, float c) { return fma(a, b, c); }
EMU_INLINE float __metal_ldexp(float x, int e, int) { return ldexp(x, e); }
EMU_INLINE float __metal_frexp(float x, int* e) { return frexp(x, *e); }
EMU_INLINE int __metal_ilogb(float x) { return ilogb(x); }
EMU_INLINE float __metal_modf(float x, float* whole) { return modf(x, *whole); }
EMU_INLINE float __metal_divide(float a, float b, int) { return a / b; }
EMU_INLINE float __metal_nextafter(float a, float b) { return nextafter(a, b); }
EMU_INLINE float __metal_saturate(float x, int) { return saturate(x); }
EMU_INLINE float __metal_sign(float x) { return sign(x); }
EMU_INLINE float __metal_mix(float a, float b, float t, int) { return mix(a, b, t); }
EMU_INLINE float __metal_step(float edge, float x, int) { return step(edge, x); }
EMU_INLINE float __metal_smoothstep(float a, float b, float x, int) { return smoothstep(a, b, x); }
EMU_INLINE float __metal_fabs(float x) { return fabs(x); }
EMU_INLINE float __metal_rint(float x) { return rint(x); }
EMU_INLINE float __metal_copysign(float x, float y) { return copysign(x, y); }
EMU_INLINE float __metal_fdim(float x, float y) { return fdim(x, y); }
EMU_INLINE float __metal_clamp(float x, float low, float high, int) { return clamp(x, low, high); }
EMU_INLINE float __metal_fmedian3(float a, float b, float c, int) { return median3(a, b, c); }
EMU_INLINE float __metal_fmax3(float a, float b, float c, int) { return max3(a, b, c); }
EMU_INLINE float __metal_fmin3(float a, float b, float c, int) { return min3(a, b, c); }

#define EMU_ONE(name) \
  template <class T> EMU_INLINE T __metal_simd_##name(T v) { return simd_##name(v); }
EMU_ONE(sum)
EMU_ONE(product)
EMU_ONE(max)
EMU_ONE(min)
EMU_ONE(broadcast_first)
EMU_ONE(prefix_inclusive_sum)
EMU_ONE(prefix_exclusive_sum)
EMU_ONE(prefix_inclusive_product)
EMU_ONE(prefix_exclusive_product)
#undef EMU_ONE

#define EMU_NOT_ON_FLOATS(name)                           \
  EMU_INLINE float __metal_simd_##name(float v) {         \
    emu_fail("simd_" #name " of a floating-point value"); \
    return v;                                             \
  }
EMU_NOT_ON_FLOATS(and)
EMU_NOT_ON_FLOATS(or)
EMU_NOT_ON_FLOATS(xor)
#undef EMU_NOT_ON_FLOATS

#define EMU_TWO(name) \
  template <class T> EMU_INLINE T __metal_simd_##name(T v, ushort lane) { return simd_##name(v, lane); }
EMU_TWO(broadcast)
EMU_TWO(shuffle)
EMU_TWO(shuffle_xor)
EMU_TWO(shuffle_down)
EMU_TWO(shuffle_up)
EMU_TWO(shuffle_rotate_down)
EMU_TWO(shuffle_rotate_up)
#undef EMU_TWO

template <class T> EMU_INLINE T __metal_simd_shuffle_and_fill_up(T v, T fill, ushort delta, ushort) {
  return simd_shuffle_and_fill_up(v, fill, delta);
}
template <class T> EMU_INLINE T __metal_simd_shuffle_and_fill_down(T v, T fill, ushort delta, ushort) {
  return simd_shuffle_and_fill_down(v, fill, delta);
}
EMU_INLINE ushort __metal_get_simdgroup_size(ushort) { return 32; }

struct os_log {
  constexpr os_log(const char*, const char*) {}
  template <class... A> void log_debug(const char*, A...) const {}
};

}  // namespace metal
