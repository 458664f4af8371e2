// The words that kernel bodies share with Metal, for CUDA (compute capability 8.0 and later).

#define threadgroup __shared__
#define thread_index_in_simdgroup (threadIdx.x & 31)
#define simdgroup_index_in_threadgroup (threadIdx.x >> 5)
#define thread_index_in_threadgroup threadIdx.x
#define threadgroup_position_in_grid blockIdx
#define thread_position_in_grid \
  uint3 { blockIdx.x * blockDim.x + threadIdx.x, blockIdx.y * blockDim.y + threadIdx.y, blockIdx.z * blockDim.z + threadIdx.z }
#define threadgroup_barrier(flags) __syncthreads()
#define UNROLL _Pragma("unroll")
#define UNROLL_BY_4 _Pragma("unroll 4")
#define ROLLED _Pragma("unroll 1")
#define FUNC __device__ __forceinline__
#ifndef INFINITY
#define INFINITY __int_as_float(0x7f800000)
#endif
#define FLOAT_LOG2E 1.44269504088896340736f
#define FLOAT_LN2 0.69314718055994530942f

typedef unsigned int uint;

FUNC float float_of_bits(int bits) {
  return __int_as_float(bits);
}

namespace fast {
FUNC float exp2(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
}  // namespace fast

// ---- Loads of 4, 8 or 16 bytes, kept as words until they are used.

template <int WORDS, typename S>
FUNC void load_words(uint* out, const S* from) {
  if constexpr (WORDS == 4) {
    const uint4 w = __ldg((const uint4*)from);
    out[0] = w.x;
    out[1] = w.y;
    out[2] = w.z;
    out[3] = w.w;
  } else if constexpr (WORDS == 2) {
    const uint2 w = __ldg((const uint2*)from);
    out[0] = w.x;
    out[1] = w.y;
  } else {
    out[0] = __ldg((const uint*)from);
  }
}

// ---- Copies into shared memory by the copy engine, which barriers count the bytes of (staged.cu).

FUNC uint shared_address(const void* p) {
  return uint(__cvta_generic_to_shared(p));
}

FUNC void barrier_init(void* barrier) {
  asm volatile("mbarrier.init.shared.b64 [%0], 1;" : : "r"(shared_address(barrier)) : "memory");
}

FUNC void barriers_are_made() {
  asm volatile("fence.mbarrier_init.release.cluster; fence.proxy.async.shared::cta;" : : : "memory");
}

FUNC void barrier_expect(void* barrier, uint bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared.b64 _, [%0], %1;"
               :
               : "r"(shared_address(barrier)), "r"(bytes)
               : "memory");
}

FUNC void barrier_wait(void* barrier, uint parity) {
  asm volatile(
      "{\n.reg .pred there;\nagain:\nmbarrier.try_wait.parity.shared.b64 there, [%0], %1;\n"
      "@there bra done;\nbra again;\ndone:\n}"
      :
      : "r"(shared_address(barrier)), "r"(parity)
      : "memory");
}

FUNC void fetch(void* to, const void* from, uint bytes, void* barrier) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];"
      :
      : "r"(shared_address(to)), "l"(from), "r"(bytes), "r"(shared_address(barrier))
      : "memory");
}

template <int WORDS, typename S>
FUNC void take_words(uint* out, const S* from) {
  if constexpr (WORDS == 4) {
    *(uint4*)out = *(const uint4*)from;
  } else if constexpr (WORDS == 2) {
    *(uint2*)out = *(const uint2*)from;
  } else {
    out[0] = *(const uint*)from;
  }
}

// The line of 128 bytes around an address, into the second-level cache.
#define PREFETCH_LINE(address) asm volatile("prefetch.global.L2 [%0];" : : "l"(address))

FUNC void copy_16_bytes(void* to, const void* from) {
  *(uint4*)to = *(const uint4*)from;
}

// ---- Pairs: two neighbouring elements, in one register where they have 16 bits.

template <typename M>
struct PairOf {
  using type = uint;
};
template <>
struct PairOf<float> {
  using type = float2;
};
template <typename M>
using Pair = typename PairOf<M>::type;

template <typename M>
FUNC Pair<M> make_pair(float x, float y) {
  if constexpr (sizeof(M) == 4) {
    return make_float2(x, y);
  } else {
    uint p;
    if constexpr (cuda::std::is_same_v<M, __half>) {
      asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(p) : "f"(y), "f"(x));
    } else {
      asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(p) : "f"(y), "f"(x));
    }
    return p;
  }
}

// Pair i of a lane's words; matrices have the stored type or are float.
template <typename S, typename M>
FUNC Pair<M> pair_at(const uint* words, int i) {
  if constexpr (sizeof(S) == 4) {
    return make_pair<M>(__uint_as_float(words[2 * i]), __uint_as_float(words[2 * i + 1]));
  } else if constexpr (cuda::std::is_same_v<S, M>) {
    return words[i];
  } else if constexpr (cuda::std::is_same_v<S, __half>) {
    return __half22float2(*(const __half2*)&words[i]);
  } else {
    return make_float2(__uint_as_float(words[i] << 16), __uint_as_float(words[i] & 0xffff0000u));
  }
}

template <typename M>
FUNC Pair<M> first_of(Pair<M> a, Pair<M> b) {
  if constexpr (sizeof(M) == 4) {
    return make_float2(a.x, b.x);
  } else {
    return __byte_perm(a, b, 0x5410);
  }
}

template <typename M>
FUNC Pair<M> second_of(Pair<M> a, Pair<M> b) {
  if constexpr (sizeof(M) == 4) {
    return make_float2(a.y, b.y);
  } else {
    return __byte_perm(a, b, 0x7632);
  }
}

// ---- 8 x 8 matrices over a warp. A lane holds (row, column) and (row, column + 1).

FUNC int matrix_row(uint lane) {
  return lane / 4;
}

FUNC int matrix_column(uint lane) {
  return lane % 4 * 2;
}

// Where element i of a lane's pair lies in a right operand: the tensor cores want it transposed.
FUNC int right_row(uint lane, int i) {
  return matrix_column(lane) + i;
}

FUNC int right_column(uint lane, int i) {
  return matrix_row(lane);
}

FUNC void multiply_add_tf32(float* acc, uint a0, uint a1, uint a2, uint a3, uint b0, uint b1) {
  asm("mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
      "{%0, %1, %2, %3};"
      : "+f"(acc[0]), "+f"(acc[1]), "+f"(acc[2]), "+f"(acc[3])
      : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

FUNC uint as_tf32(float x) {
  uint y;
  asm("cvt.rna.tf32.f32 %0, %1;" : "=r"(y) : "f"(x));
  return y;
}

// acc [16, 8] += left [16, 8] * right [8, 8] in float32: each factor is a sum of two tf32 numbers,
// and of the four products only that of the two small parts is left out.
FUNC void multiply_add_float(float* acc, float2 top, float2 bottom, float2 right) {
  const float left[4] = {top.x, bottom.x, top.y, bottom.y};
  const float other[2] = {right.x, right.y};
  uint a[4], a_rest[4], b[2], b_rest[2];
  UNROLL for (int i = 0; i < 4; i++) {
    a[i] = as_tf32(left[i]);
    a_rest[i] = as_tf32(left[i] - __uint_as_float(a[i]));
  }
  UNROLL for (int i = 0; i < 2; i++) {
    b[i] = as_tf32(other[i]);
    b_rest[i] = as_tf32(other[i] - __uint_as_float(b[i]));
  }
  multiply_add_tf32(acc, a_rest[0], a_rest[1], a_rest[2], a_rest[3], b[0], b[1]);
  multiply_add_tf32(acc, a[0], a[1], a[2], a[3], b_rest[0], b_rest[1]);
  multiply_add_tf32(acc, a[0], a[1], a[2], a[3], b[0], b[1]);
}

// acc [16, 8] += left [16, 16] * right [16, 8]; acc holds the lane's pairs of rows 0-7 and 8-15.
// left: rows 0-7 and 8-15 of columns 0-7, then of columns 8-15; right: rows 0-7, then 8-15.
template <typename M>
FUNC void multiply_add(
    float* acc, Pair<M> top0, Pair<M> bottom0, Pair<M> top1, Pair<M> bottom1, Pair<M> right0, Pair<M> right1) {
  if constexpr (sizeof(M) == 4) {
    multiply_add_float(acc, top0, bottom0, right0);
    multiply_add_float(acc, top1, bottom1, right1);
  } else if constexpr (cuda::std::is_same_v<M, __half>) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
        "{%0, %1, %2, %3};"
        : "+f"(acc[0]), "+f"(acc[1]), "+f"(acc[2]), "+f"(acc[3])
        : "r"(top0), "r"(bottom0), "r"(top1), "r"(bottom1), "r"(right0), "r"(right1));
  } else {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
        "{%0, %1, %2, %3};"
        : "+f"(acc[0]), "+f"(acc[1]), "+f"(acc[2]), "+f"(acc[3])
        : "r"(top0), "r"(bottom0), "r"(top1), "r"(bottom1), "r"(right0), "r"(right1));
  }
}

FUNC float shuffle(float v, int lane) {
  return __shfl_sync(0xffffffffu, v, lane);
}

FUNC int shuffle(int v, int lane) {
  return __shfl_sync(0xffffffffu, v, lane);
}

// A lane's pair of any matrix, as the same matrix in the place of a right operand: transposed.
template <typename M>
FUNC Pair<M> pair_as_right(Pair<M> pair, uint lane) {
  if constexpr (sizeof(M) == 4) {
    const int from = matrix_column(lane) * 4 + matrix_row(lane) / 2;
    const float x0 = shuffle(pair.x, from), y0 = shuffle(pair.y, from);
    const float x1 = shuffle(pair.x, from + 4), y1 = shuffle(pair.y, from + 4);
    return matrix_row(lane) % 2 ? make_float2(y0, y1) : make_float2(x0, x1);
  } else {
    asm("movmatrix.sync.aligned.m8n8.trans.b16 %0, %0;" : "+r"(pair));
    return pair;
  }
}

// A lane's pair of a result, likewise.
template <typename M>
FUNC Pair<M> as_right(float x, float y, uint lane) {
  return pair_as_right<M>(make_pair<M>(x, y), lane);
}

FUNC float simd_shuffle_xor(float v, int mask) {
  return __shfl_xor_sync(0xffffffffu, v, mask);
}

FUNC float max_over_rows(float v) {
  v = fmaxf(v, simd_shuffle_xor(v, 4));
  v = fmaxf(v, simd_shuffle_xor(v, 8));
  return fmaxf(v, simd_shuffle_xor(v, 16));
}

FUNC float sum_over_rows(float v) {
  v += simd_shuffle_xor(v, 4);
  v += simd_shuffle_xor(v, 8);
  return v + simd_shuffle_xor(v, 16);
}

FUNC float simd_max(float v) {
  UNROLL for (int mask = 16; mask; mask >>= 1) v = fmaxf(v, simd_shuffle_xor(v, mask));
  return v;
}

FUNC float simd_sum(float v) {
  UNROLL for (int mask = 16; mask; mask >>= 1) v += simd_shuffle_xor(v, mask);
  return v;
}

FUNC float exact_tanh(float x) {
  return tanhf(x);
}

// Last: __device__ above is a macro that contains this word.
#define device
