// vec<T, N>, its named forms, swizzles, packed vectors and metal::array.
#pragma once
#include "limits.h"

namespace metal {
template <class T, int N> struct vec;
}

namespace emu {
using metal::vec;

template <class T> struct shape {
  static constexpr bool is_vector = false;
  static constexpr int width = 1;
  typedef T element;
};
template <class T, int N> struct shape<vec<T, N>> {
  static constexpr bool is_vector = true;
  static constexpr int width = N;
  typedef T element;
};
template <class T> constexpr bool is_vector = shape<__remove_cvref(T)>::is_vector;

struct splat {};

EMU_INLINE constexpr int checked(int i, int width) {
  if (__builtin_expect(unsigned(i) >= unsigned(width), 0)) emu_fail("vector index out of range");
  return i;
}

// What a swizzle on the left of an assignment becomes.
template <class Vector, int... I> struct swizzle_target {
  Vector& target;
  typedef vec<typename shape<Vector>::element, sizeof...(I)> value_type;
  EMU_INLINE operator value_type() const { return value_type(target[I]...); }
  EMU_INLINE void operator=(const value_type& value) {
    int k = 0;
    ((target[I] = value[k++]), ...);
  }
  EMU_INLINE void operator+=(const value_type& value) { *this = value_type(*this) + value; }
  EMU_INLINE void operator-=(const value_type& value) { *this = value_type(*this) - value; }
  EMU_INLINE void operator*=(const value_type& value) { *this = value_type(*this) * value; }
  EMU_INLINE void operator/=(const value_type& value) { *this = value_type(*this) / value; }
};
}  // namespace emu

namespace metal {

template <class T> constexpr bool is_vector_v = emu::is_vector<T>;

#define EMU_VECTOR_MEMBERS(N)                                                                            \
  vec() = default;                                                                                       \
  template <class S, class = enable_if_t<!emu::is_vector<S> && __is_convertible(S, T)>>                  \
  EMU_INLINE constexpr vec(S s) : vec(emu::splat{}, T(s)) {}                                             \
  template <class S,                                                                                     \
            class = enable_if_t<!emu::is_vector<S> && !__is_convertible(S, T) && is_arithmetic_v<S>>,    \
            int = 0>                                                                                     \
  explicit EMU_INLINE constexpr vec(S s) : vec(emu::splat{}, T(s)) {}                                    \
  template <class U, class = enable_if_t<!__is_same(U, T)>>                                              \
  explicit EMU_INLINE constexpr vec(const vec<U, N>& other) {                                            \
    for (int i = 0; i < N; i++) data[i] = T(other.data[i]);                                              \
  }                                                                                                      \
  template <class A, class B, class... Rest,                                                             \
            class = enable_if_t<                                                                         \
                emu::shape<A>::width + emu::shape<B>::width + (0 + ... + emu::shape<Rest>::width) == N>> \
  EMU_INLINE constexpr vec(const A& a, const B& b, const Rest&... rest) : data{} {                       \
    int filled = 0;                                                                                      \
    append(filled, a);                                                                                   \
    append(filled, b);                                                                                   \
    (append(filled, rest), ...);                                                                         \
  }                                                                                                      \
  template <class A> EMU_INLINE constexpr void append(int& filled, const A& a) {                         \
    if constexpr (emu::is_vector<A>) {                                                                   \
      for (int i = 0; i < emu::shape<A>::width; i++) data[filled++] = T(a.data[i]);                      \
    } else {                                                                                             \
      data[filled++] = T(a);                                                                             \
    }                                                                                                    \
  }                                                                                                      \
  EMU_INLINE constexpr T& operator[](int i) { return data[emu::checked(i, N)]; }                         \
  EMU_INLINE constexpr const T& operator[](int i) const { return data[emu::checked(i, N)]; }             \
  template <int... I> EMU_INLINE constexpr vec<T, sizeof...(I)> swizzle() const {                        \
    static_assert(((I < N) && ...), "swizzle past the vector's width");                                  \
    return vec<T, sizeof...(I)>(data[I]...);                                                             \
  }                                                                                                      \
  template <int... I> EMU_INLINE constexpr emu::swizzle_target<vec, I...> swizzle_to() {                 \
    static_assert(((I < N) && ...), "swizzle past the vector's width");                                  \
    return emu::swizzle_target<vec, I...>{*this};                                                        \
  }

template <class T> struct alignas(2 * sizeof(T)) vec<T, 2> {
  union {
    T data[2];
    struct {
      T x, y;
    };
    struct {
      T r, g;
    };
  };
  EMU_INLINE constexpr vec(emu::splat, T s) : data{s, s} {}
  EMU_VECTOR_MEMBERS(2)
};
template <class T> struct alignas(4 * sizeof(T)) vec<T, 3> {
  union {
    T data[3];
    struct {
      T x, y, z;
    };
    struct {
      T r, g, b;
    };
  };
  EMU_INLINE constexpr vec(emu::splat, T s) : data{s, s, s} {}
  EMU_VECTOR_MEMBERS(3)
};
template <class T> struct alignas(4 * sizeof(T)) vec<T, 4> {
  union {
    T data[4];
    struct {
      T x, y, z, w;
    };
    struct {
      T r, g, b, a;
    };
  };
  EMU_INLINE constexpr vec(emu::splat, T s) : data{s, s, s, s} {}
  EMU_VECTOR_MEMBERS(4)
};
#undef EMU_VECTOR_MEMBERS

#define EMU_VECTOR_BINARY(op, RESULT)                                                       \
  template <class T, int N>                                                                 \
  EMU_INLINE constexpr vec<RESULT, N> operator op(const vec<T, N>& a, const vec<T, N>& b) { \
    vec<RESULT, N> r;                                                                       \
    for (int i = 0; i < N; i++) r.data[i] = RESULT(a.data[i] op b.data[i]);                 \
    return r;                                                                               \
  }                                                                                         \
  template <class T, int N, class S, class = enable_if_t<is_arithmetic_v<S>>>               \
  EMU_INLINE constexpr vec<RESULT, N> operator op(const vec<T, N>& a, S b) {                \
    return a op vec<T, N>(emu::splat{}, T(b));                                              \
  }                                                                                         \
  template <class T, int N, class S, class = enable_if_t<is_arithmetic_v<S>>>               \
  EMU_INLINE constexpr vec<RESULT, N> operator op(S a, const vec<T, N>& b) {                \
    return vec<T, N>(emu::splat{}, T(a)) op b;                                              \
  }
#define EMU_VECTOR_ARITHMETIC(op)                                                       \
  EMU_VECTOR_BINARY(op, T)                                                              \
  template <class T, int N>                                                             \
  EMU_INLINE constexpr vec<T, N>& operator op## = (vec<T, N> & a, const vec<T, N>& b) { \
    return a = a op b;                                                                  \
  }                                                                                     \
  template <class T, int N, class S, class = enable_if_t<is_arithmetic_v<S>>>           \
  EMU_INLINE constexpr vec<T, N>& operator op## = (vec<T, N> & a, S b) {                \
    return a = a op b;                                                                  \
  }
EMU_VECTOR_ARITHMETIC(+)
EMU_VECTOR_ARITHMETIC(-)
EMU_VECTOR_ARITHMETIC(*)
EMU_VECTOR_ARITHMETIC(/)
EMU_VECTOR_ARITHMETIC(%)
EMU_VECTOR_ARITHMETIC(&)
EMU_VECTOR_ARITHMETIC(|)
EMU_VECTOR_ARITHMETIC(^)
EMU_VECTOR_ARITHMETIC(<<)
EMU_VECTOR_ARITHMETIC(>>)
EMU_VECTOR_BINARY(<, bool)
EMU_VECTOR_BINARY(>, bool)
EMU_VECTOR_BINARY(<=, bool)
EMU_VECTOR_BINARY(>=, bool)
EMU_VECTOR_BINARY(==, bool)
EMU_VECTOR_BINARY(!=, bool)
EMU_VECTOR_BINARY(&&, bool)
EMU_VECTOR_BINARY(||, bool)
#undef EMU_VECTOR_ARITHMETIC
#undef EMU_VECTOR_BINARY

#define EMU_VECTOR_UNARY(op, RESULT)                                                              \
  template <class T, int N> EMU_INLINE constexpr vec<RESULT, N> operator op(const vec<T, N>& a) { \
    vec<RESULT, N> r;                                                                             \
    for (int i = 0; i < N; i++) r.data[i] = op a.data[i];                                         \
    return r;                                                                                     \
  }
EMU_VECTOR_UNARY(-, T)
EMU_VECTOR_UNARY(~, T)
EMU_VECTOR_UNARY(!, bool)
#undef EMU_VECTOR_UNARY

template <class T, int N> struct packed_vec {
  T data[N];
  packed_vec() = default;
  packed_vec(const vec<T, N>& v) {
    for (int i = 0; i < N; i++) data[i] = v.data[i];
  }
  operator vec<T, N>() const {
    vec<T, N> v;
    for (int i = 0; i < N; i++) v.data[i] = data[i];
    return v;
  }
  T& operator[](int i) { return data[emu::checked(i, N)]; }
  T operator[](int i) const { return data[emu::checked(i, N)]; }
};

template <class T, size_t N> struct array {
  T elements[N];
  T& operator[](size_t i) { return elements[i]; }
  const T& operator[](size_t i) const { return elements[i]; }
  constexpr size_t size() const { return N; }
};

#define EMU_FOR_SCALARS(do_it)                                                                       \
  do_it(bool) do_it(char) do_it(uchar) do_it(short) do_it(ushort) do_it(int) do_it(uint) do_it(long) \
      do_it(ulong) do_it(half) do_it(float) do_it(bfloat)
#define EMU_NAMED(T)                      \
  typedef vec<T, 2> T##2;                 \
  typedef vec<T, 3> T##3;                 \
  typedef vec<T, 4> T##4;                 \
  typedef packed_vec<T, 2> packed_##T##2; \
  typedef packed_vec<T, 3> packed_##T##3; \
  typedef packed_vec<T, 4> packed_##T##4;
EMU_FOR_SCALARS(EMU_NAMED)
#undef EMU_NAMED

}  // namespace metal

// Visible without `using namespace metal`, as the driver's compiler makes them.
using metal::vec;
#define EMU_USING(T)          \
  using metal::T##2;          \
  using metal::T##3;          \
  using metal::T##4;          \
  using metal::packed_##T##2; \
  using metal::packed_##T##3; \
  using metal::packed_##T##4;
EMU_FOR_SCALARS(EMU_USING)
#undef EMU_USING
