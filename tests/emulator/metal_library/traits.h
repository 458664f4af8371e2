// Scalar types, address-space words and <metal_type_traits>.
#pragma once
#include "../runtime/abi.h"

#define EMU_INLINE inline __attribute__((always_inline))
// Access to the runtime's own memory: not the kernel's, so not checked.
#define EMU_UNCHECKED __attribute__((no_sanitize("thread", "undefined")))

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
typedef _Float16 half;

#define device
#define thread
#define threadgroup
#define constant const
#define kernel

namespace metal {

template <class T, T v> struct integral_constant {
  static constexpr T value = v;
  typedef T value_type;
  constexpr operator T() const { return v; }
  constexpr T operator()() const { return v; }
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

template <class T> struct remove_cv {
  typedef __remove_cv(T) type;
};
template <class T> struct remove_reference {
  typedef __remove_reference_t(T) type;
};
template <class T> struct remove_addrspace {
  typedef __remove_cv(T) type;
};
template <class T> using remove_cv_t = __remove_cv(T);
template <class T> using remove_reference_t = __remove_reference_t(T);
template <class T> using remove_cvref_t = __remove_cvref(T);
template <class T> using remove_addrspace_t = __remove_cv(T);
template <class T> using remove_const_t = __remove_const(T);
template <class T> using remove_pointer_t = __remove_pointer(T);
template <class T> using decay_t = __decay(T);
template <class T> using make_unsigned_t = __make_unsigned(T);
template <class T> using make_signed_t = __make_signed(T);

#define EMU_TRAIT(name, value)                        \
  template <class T> constexpr bool name##_v = value; \
  template <class T> struct name : bool_constant<value> {};
EMU_TRAIT(is_integral, __is_integral(T))
EMU_TRAIT(is_signed, __is_signed(T))
EMU_TRAIT(is_unsigned, __is_unsigned(T))
EMU_TRAIT(is_pointer, __is_pointer(T))
EMU_TRAIT(is_const, __is_const(T))
#undef EMU_TRAIT

template <class T, class U> constexpr bool is_same_v = __is_same(T, U);
template <class T, class U> struct is_same : bool_constant<__is_same(T, U)> {};
template <class From, class To> constexpr bool is_convertible_v = __is_convertible(From, To);
template <class From, class To> struct is_convertible : bool_constant<__is_convertible(From, To)> {};

template <class...> struct _disjunction : false_type {};
template <class A, class... B>
struct _disjunction<A, B...> : conditional_t<bool(A::value), A, _disjunction<B...>> {};

template <class T> T&& declval();

template <class To, class From> EMU_INLINE constexpr To as_type_bits(const From& from) {
  static_assert(sizeof(To) == sizeof(From), "as_type: sizes differ");
  return __builtin_bit_cast(To, from);
}

}  // namespace metal

template <class To, class From> EMU_INLINE constexpr To as_type(const From& from) {
  return metal::as_type_bits<To>(from);
}
