// Metal's names, declared and never defined, for clang's OpenCL C++ front end: its address spaces are
// Metal's.
#pragma once
#pragma OPENCL EXTENSION cl_khr_fp16 : enable
#pragma OPENCL EXTENSION __cl_clang_function_pointers : enable
#pragma OPENCL EXTENSION __cl_clang_variadic_functions : enable
#define device __global
#define threadgroup __local
#define constant __constant
#define thread __private

typedef __SIZE_TYPE__ size_t;
typedef __PTRDIFF_TYPE__ ptrdiff_t;
typedef unsigned char uchar, uint8_t;
typedef unsigned short ushort, uint16_t;
typedef unsigned int uint, uint32_t;
typedef unsigned long ulong, uint64_t;
typedef signed char int8_t;
typedef short int16_t;
typedef int int32_t;
typedef long int64_t;
typedef __bf16 bfloat;

namespace metal {

// ---- types
// --------------------------------------------------------------------------------------------------------
template <class T, T v> struct integral_constant {
  static constexpr constant T value = v;
  typedef T value_type;
};
template <bool b> using bool_constant = integral_constant<bool, b>;
using true_type = bool_constant<true>;
using false_type = bool_constant<false>;
template <bool condition, class T = void> struct enable_if {};
template <class T> struct enable_if<true, T> {
  typedef T type;
};
template <bool condition, class T = void> using enable_if_t = typename enable_if<condition, T>::type;
template <bool condition, class T, class U> struct conditional {
  typedef T type;
};
template <class T, class U> struct conditional<false, T, U> {
  typedef U type;
};
template <bool condition, class T, class U> using conditional_t = typename conditional<condition, T, U>::type;

template <class T> struct remove_addrspace {
  typedef T type;
};
template <class T> struct remove_addrspace<device T> {
  typedef T type;
};
template <class T> struct remove_addrspace<constant T> {
  typedef T type;
};
template <class T> struct remove_addrspace<threadgroup T> {
  typedef T type;
};
template <class T> struct remove_addrspace<thread T> {
  typedef T type;
};
template <class T> using remove_addrspace_t = typename remove_addrspace<T>::type;
template <class T> using remove_cv_t = __remove_cv(T);
template <class T> using remove_reference_t = __remove_reference_t(T);
template <class T> using remove_cvref_t = __remove_cvref(T);
template <class T> using remove_const_t = __remove_const(T);
template <class T> using remove_pointer_t = __remove_pointer(T);
template <class T> using make_unsigned_t = __make_unsigned(T);

#define EMU_TRAIT(name, value)                                        \
  template <class T> static constexpr constant bool name##_v = value; \
  template <class T> struct name : bool_constant<value> {};
EMU_TRAIT(is_integral, __is_integral(T))
EMU_TRAIT(is_signed, __is_signed(T))
EMU_TRAIT(is_unsigned, __is_unsigned(T))
EMU_TRAIT(is_pointer, __is_pointer(T))
EMU_TRAIT(is_floating_point,
          (__is_same(remove_addrspace_t<T>, float) || __is_same(remove_addrspace_t<T>, half) ||
           __is_same(remove_addrspace_t<T>, bfloat)))
EMU_TRAIT(is_arithmetic, (__is_integral(T) || is_floating_point_v<T>))
#undef EMU_TRAIT
template <class T, class U>
static constexpr constant bool is_same_v = __is_same(remove_addrspace_t<T>, remove_addrspace_t<U>);
template <class T, class U> struct is_same : bool_constant<__is_same(T, U)> {};
template <class From, class To> static constexpr constant bool is_convertible_v = __is_convertible(From, To);
template <class From, class To> struct is_convertible : bool_constant<__is_convertible(From, To)> {};
template <class...> struct _disjunction : false_type {};
template <class A, class... B>
struct _disjunction<A, B...> : conditional_t<bool(A::value), A, _disjunction<B...>> {};

template <class T> struct numeric_limits {
  static constexpr constant int digits = 0;
  static constexpr constant bool is_signed = true;
  static constexpr T any() { return T(0); }
  static constexpr T min() { return any(); }
  static constexpr T max() { return any(); }
  static constexpr T lowest() { return any(); }
  static constexpr T infinity() { return any(); }
  static constexpr T quiet_NaN() { return any(); }
  static constexpr T epsilon() { return any(); }
};

template <class T, int N> using vec = T __attribute__((ext_vector_type(N)));
#define EMU_VECTORS(T)    \
  typedef vec<T, 2> T##2; \
  typedef vec<T, 3> T##3; \
  typedef vec<T, 4> T##4;
EMU_VECTORS(char)
EMU_VECTORS(uchar)
EMU_VECTORS(short)
EMU_VECTORS(ushort)
EMU_VECTORS(int)
EMU_VECTORS(uint)
EMU_VECTORS(long)
EMU_VECTORS(ulong)
EMU_VECTORS(half)
EMU_VECTORS(float)
typedef vec<uchar, 2> bool2;
typedef vec<uchar, 3> bool3;
typedef vec<uchar, 4> bool4;
typedef vec<bfloat, 2> bfloat2;
typedef vec<bfloat, 3> bfloat3;
typedef vec<bfloat, 4> bfloat4;
template <class T, int N> struct packed_vec {
  T data[N];
};
// What `float4(…)` and `as_type<T>(…)` are rewritten to.
template <class Vector> struct emu_vector {
  template <class... A> static constexpr Vector of(A...);
};
template <class To, class From> constexpr To emu_as_type(From);
template <class T> struct emu_same {
  typedef T type;
};

}  // namespace metal

using metal::vec;
#define EMU_USING(T) \
  using metal::T##2; \
  using metal::T##3; \
  using metal::T##4;
EMU_USING(bool)
EMU_USING(char)
EMU_USING(uchar)
EMU_USING(short)
EMU_USING(ushort)
EMU_USING(int)
EMU_USING(uint)
EMU_USING(long)
EMU_USING(ulong)
EMU_USING(half)
EMU_USING(float)
EMU_USING(bfloat)
#undef EMU_USING
#undef EMU_VECTORS
