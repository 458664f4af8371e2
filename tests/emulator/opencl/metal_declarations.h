// Metal's functions, declared and never defined, for clang's OpenCL C++ front end: its address spaces are
// Metal's.
#pragma once
#include "types.h"

namespace metal {

// ---- functions
// ----------------------------------------------------------------------------------------------------
#define EMU_UNARY(name)                               \
  float name(float);                                  \
  half name(half);                                    \
  template <int N> vec<float, N> name(vec<float, N>); \
  template <int N> vec<half, N> name(vec<half, N>);
#define EMU_BINARY(name)                                             \
  float name(float, float);                                          \
  half name(half, half);                                             \
  template <int N> vec<float, N> name(vec<float, N>, vec<float, N>); \
  template <int N> vec<half, N> name(vec<half, N>, vec<half, N>);
#define EMU_ELEMENTARY                                                                                \
  EMU_UNARY(exp)                                                                                      \
  EMU_UNARY(exp2)                                                                                     \
  EMU_UNARY(exp10)                                                                                    \
  EMU_UNARY(log) EMU_UNARY(log2) EMU_UNARY(log10) EMU_UNARY(sin) EMU_UNARY(cos) EMU_UNARY(tan)        \
      EMU_UNARY(asin) EMU_UNARY(acos) EMU_UNARY(atan) EMU_UNARY(sinh) EMU_UNARY(cosh) EMU_UNARY(tanh) \
          EMU_UNARY(asinh) EMU_UNARY(acosh) EMU_UNARY(atanh) EMU_UNARY(sinpi) EMU_UNARY(cospi)        \
              EMU_UNARY(tanpi) EMU_UNARY(sqrt) EMU_UNARY(rsqrt) EMU_UNARY(floor) EMU_UNARY(ceil)      \
                  EMU_UNARY(trunc) EMU_UNARY(rint) EMU_UNARY(round) EMU_UNARY(fabs) EMU_UNARY(fract)  \
                      EMU_BINARY(pow) EMU_BINARY(powr) EMU_BINARY(atan2) EMU_BINARY(fmod)             \
                          EMU_BINARY(copysign) EMU_BINARY(fdim) EMU_BINARY(fmax) EMU_BINARY(fmin)
#define EMU_MODE                    \
  EMU_ELEMENTARY                    \
  float max(float, float);          \
  float min(float, float);          \
  float divide(float, float);       \
  float clamp(float, float, float); \
  float abs(float);                 \
  float fma(float, float, float);   \
  bool isnan(float);
EMU_ELEMENTARY
EMU_BINARY(nextafter)
EMU_BINARY(step)
namespace precise {
EMU_MODE
}
namespace fast {
EMU_MODE
}
// The compiler's own names, which MLX's bfloat overloads call.
#undef EMU_UNARY
#undef EMU_BINARY
#define EMU_UNARY(name) float __metal_##name(float, int);
#define EMU_BINARY(name) float __metal_##name(float, float, int);
EMU_ELEMENTARY
EMU_BINARY(step)
EMU_BINARY(divide)
EMU_UNARY(saturate)
#undef EMU_UNARY
#undef EMU_BINARY
#undef EMU_ELEMENTARY
#undef EMU_MODE
float __metal_fma(float, float, float);
float __metal_ldexp(float, int, int);
float __metal_frexp(float, thread int*);
int __metal_ilogb(float);
float __metal_modf(float, thread float*);
float __metal_nextafter(float, float);
float __metal_sign(float);
float __metal_fabs(float);
float __metal_rint(float);
float __metal_copysign(float, float);
float __metal_fdim(float, float);
float __metal_mix(float, float, float, int);
float __metal_smoothstep(float, float, float, int);
float __metal_clamp(float, float, float, int);
float __metal_fmedian3(float, float, float, int);
float __metal_fmax3(float, float, float, int);
float __metal_fmin3(float, float, float, int);

#define EMU_ORDER(T) \
  T max(T, T);       \
  T min(T, T);       \
  T clamp(T, T, T);  \
  T abs(T);          \
  T max3(T, T, T);   \
  T min3(T, T, T);
EMU_ORDER(char)
EMU_ORDER(int8_t)
EMU_ORDER(uchar)
EMU_ORDER(short)
EMU_ORDER(ushort)
EMU_ORDER(int)
EMU_ORDER(uint)
EMU_ORDER(long)
EMU_ORDER(ulong)
EMU_ORDER(float)
EMU_ORDER(half)
#undef EMU_ORDER
template <class T, int N> vec<T, N> max(vec<T, N>, vec<T, N>);
template <class T, int N> vec<T, N> min(vec<T, N>, vec<T, N>);
template <class T, int N> vec<T, N> abs(vec<T, N>);
template <class T, int N> vec<T, N> clamp(vec<T, N>, vec<T, N>, vec<T, N>);
template <class T, int N> T dot(vec<T, N>, vec<T, N>);
template <class T, int N> T length(vec<T, N>);
template <class T, int N> T length_squared(vec<T, N>);

#define EMU_FLOATING(T)  \
  T fma(T, T, T);        \
  T mix(T, T, T);        \
  T ldexp(T, int);       \
  T sign(T);             \
  T saturate(T);         \
  T divide(T, T);        \
  T median3(T, T, T);    \
  T smoothstep(T, T, T); \
  bool isnormal(T);      \
  bool signbit(T);
EMU_FLOATING(float)
EMU_FLOATING(half)
#undef EMU_FLOATING
template <class T, int N> vec<T, N> fma(vec<T, N>, vec<T, N>, vec<T, N>);
float frexp(float, thread int&);
float modf(float, thread float&);
int ilogb(float);
#define EMU_CLASSIFY(name) \
  bool name(float);        \
  bool name(half);         \
  bool name(bfloat);
EMU_CLASSIFY(isnan)
EMU_CLASSIFY(isinf)
EMU_CLASSIFY(isfinite)
#undef EMU_CLASSIFY
template <class T> T select(T, T, bool);
template <class T> bool any(T);
template <class T> bool all(T);
template <class T> T popcount(T);
template <class T> T clz(T);
template <class T> T ctz(T);
template <class T> T absdiff(T, T);
template <class T> T extract_bits(T, uint, uint);
uint mulhi(uint, uint);
int mulhi(int, int);
uint rotate(uint, uint);
uint reverse_bits(uint);

// ---- simdgroups and quadgroups
// ------------------------------------------------------------------------------------
template <class T>
static constexpr constant bool emu_can_be_shuffled =
    !__is_same(T, bool) && !__is_same(T, bfloat) && !__is_same(T, long) && !__is_same(T, ulong);
#define EMU_SHUFFLED template <class T, class = enable_if_t<emu_can_be_shuffled<T>>>
#define EMU_ONE(name)     \
  EMU_SHUFFLED T name(T); \
  template <class T> T __metal_##name(T);
#define EMU_TWO(name)             \
  EMU_SHUFFLED T name(T, ushort); \
  template <class T> T __metal_##name(T, ushort);
EMU_ONE(simd_sum)
EMU_ONE(simd_product)
EMU_ONE(simd_max)
EMU_ONE(simd_min)
EMU_ONE(simd_and)
EMU_ONE(simd_or)
EMU_ONE(simd_xor)
EMU_ONE(simd_prefix_inclusive_sum)
EMU_ONE(simd_prefix_exclusive_sum)
EMU_ONE(simd_prefix_inclusive_product)
EMU_ONE(simd_prefix_exclusive_product)
EMU_ONE(simd_broadcast_first)
EMU_ONE(quad_sum)
EMU_ONE(quad_product)
EMU_ONE(quad_max)
EMU_ONE(quad_min)
EMU_TWO(simd_shuffle)
EMU_TWO(simd_broadcast)
EMU_TWO(simd_shuffle_xor)
EMU_TWO(simd_shuffle_up)
EMU_TWO(simd_shuffle_down)
EMU_TWO(simd_shuffle_rotate_up)
EMU_TWO(simd_shuffle_rotate_down)
EMU_TWO(quad_shuffle)
EMU_TWO(quad_broadcast)
EMU_TWO(quad_shuffle_xor)
EMU_TWO(quad_shuffle_down)
#undef EMU_ONE
#undef EMU_TWO
EMU_SHUFFLED T simd_shuffle_and_fill_up(T, T, ushort);
EMU_SHUFFLED T simd_shuffle_and_fill_down(T, T, ushort);
#undef EMU_SHUFFLED
template <class T> T __metal_simd_shuffle_and_fill_up(T, T, ushort, ushort);
template <class T> T __metal_simd_shuffle_and_fill_down(T, T, ushort, ushort);
ushort __metal_get_simdgroup_size(ushort);
bool simd_any(bool);
bool simd_all(bool);
bool simd_is_first();
struct simd_vote {
  typedef ulong vote_t;
  explicit operator ulong() const;
  bool all() const;
  bool any() const;
};
simd_vote simd_ballot(bool);
simd_vote simd_active_threads_mask();

// ---- barriers and atomics
// -----------------------------------------------------------------------------------------
enum class mem_flags : uint { mem_none = 0, mem_device = 1, mem_threadgroup = 2, mem_texture = 4 };
constexpr mem_flags operator|(mem_flags a, mem_flags b) { return mem_flags(uint(a) | uint(b)); }
enum memory_order {
  memory_order_relaxed,
  memory_order_acquire,
  memory_order_release,
  memory_order_acq_rel,
  memory_order_seq_cst
};
enum thread_scope {
  thread_scope_thread,
  thread_scope_simdgroup,
  thread_scope_threadgroup,
  thread_scope_device,
  thread_scope_system
};
void threadgroup_barrier(mem_flags);
void simdgroup_barrier(mem_flags);
void atomic_thread_fence(mem_flags, memory_order, thread_scope = thread_scope_device);

template <class T> struct atomic {
  T value;
};
typedef atomic<int> atomic_int;
typedef atomic<uint> atomic_uint;
typedef atomic<float> atomic_float;
typedef atomic<bool> atomic_bool;
typedef atomic<ulong> atomic_ulong;
#define EMU_FETCH(name, space) \
  template <class T>           \
  T atomic_##name##_explicit(volatile space atomic<T>*, typename emu_same<T>::type, memory_order);
#define EMU_ATOMICS(space)                                                                         \
  EMU_FETCH(exchange, space)                                                                       \
  EMU_FETCH(fetch_add, space)                                                                      \
  EMU_FETCH(fetch_sub, space)                                                                      \
  EMU_FETCH(fetch_and, space)                                                                      \
  EMU_FETCH(fetch_or, space) EMU_FETCH(fetch_xor, space) EMU_FETCH(fetch_max, space)               \
      EMU_FETCH(fetch_min, space) template <class T>                                               \
      T atomic_load_explicit(const volatile space atomic<T>*, memory_order);                       \
  template <class T>                                                                               \
  void atomic_store_explicit(volatile space atomic<T>*, typename emu_same<T>::type, memory_order); \
  template <class T>                                                                               \
  bool atomic_compare_exchange_weak_explicit(volatile space atomic<T>*, thread T*,                 \
                                             typename emu_same<T>::type, memory_order, memory_order);
EMU_ATOMICS(device)
EMU_ATOMICS(threadgroup)
#undef EMU_ATOMICS
#undef EMU_FETCH

// ---- matrices
// -----------------------------------------------------------------------------------------------------
template <class T, int R = 8, int C = 8> struct simdgroup_matrix {
  typedef vec<T, 2> storage_type;
  T elements[2];
  simdgroup_matrix() = default;
  explicit simdgroup_matrix(T);
  thread storage_type& thread_elements();
  const thread storage_type& thread_elements() const;
};
typedef simdgroup_matrix<float> simdgroup_float8x8;
typedef simdgroup_matrix<half> simdgroup_half8x8;
typedef simdgroup_matrix<bfloat> simdgroup_bfloat8x8;
template <class T, int R, int C> simdgroup_matrix<T, R, C> make_filled_simdgroup_matrix(T);
#define EMU_MATRIX_MEMORY(space)                                                                          \
  template <class T, int R, int C>                                                                        \
  void simdgroup_load(thread simdgroup_matrix<T, R, C>&, const space T*, ulong = 8, ulong2 = (ulong2)(0), \
                      bool = false);                                                                      \
  template <class T, int R, int C>                                                                        \
  void simdgroup_store(simdgroup_matrix<T, R, C>, space T*, ulong = 8, ulong2 = (ulong2)(0), bool = false);
EMU_MATRIX_MEMORY(device)
EMU_MATRIX_MEMORY(threadgroup)
#undef EMU_MATRIX_MEMORY
template <class D, class A, class B, class Addend, int R, int C>
void simdgroup_multiply_accumulate(thread simdgroup_matrix<D, R, C>&, simdgroup_matrix<A, R, C>,
                                   simdgroup_matrix<B, R, C>, simdgroup_matrix<Addend, R, C>);
template <class D, class A, class B, int R, int C>
void simdgroup_multiply(thread simdgroup_matrix<D, R, C>&, simdgroup_matrix<A, R, C>,
                        simdgroup_matrix<B, R, C>);

struct os_log {
  constexpr os_log(constant char*, constant char*) constant {}
  template <class... A> void log_debug(constant char*, A...) const constant;
};

}  // namespace metal
