// Everything that a translated kernel includes: the library, and how its entry point gets its arguments.
#pragma once
#include "compiler_names.h"
#include "synchronization.h"

namespace emu {
// A buffer takes the type of the parameter that it is passed to.
struct Pointer {
  void* address;
  template <class T> EMU_UNCHECKED EMU_INLINE operator T*() const { return (T*)address; }
};
struct Reference {
  void* address;
  template <class T> EMU_UNCHECKED EMU_INLINE operator T&() const { return *(T*)address; }
};

template <class T> struct Position {
  static EMU_UNCHECKED EMU_INLINE T of(unsigned v) { return T(v); }
  static EMU_UNCHECKED EMU_INLINE T of(const unsigned* v) { return T(v[0]); }
};
template <class T, int N> struct Position<vec<T, N>> {
  static EMU_UNCHECKED EMU_INLINE vec<T, N> of(const unsigned* v) {
    vec<T, N> r;
    for (int i = 0; i < N; i++) r.data[i] = T(v[i]);
    return r;
  }
};
static const unsigned origin[3] = {0, 0, 0};
}  // namespace emu
