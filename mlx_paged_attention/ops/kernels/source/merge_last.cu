// CUDA only, after the body of paged_decode: the last threadgroup to finish a piece of a row merges all of
// them, so that no second kernel need be launched. (Metal promises no order between threadgroups that
// would allow this.) Each row's counters are 0 before and after. R: type of merged.

const int first_piece = splits[row * (2 + gridDim.x)], pieces = splits[row * (2 + gridDim.x) + 1];
__threadfence();
threadgroup bool is_last;
__syncthreads();
if (threadIdx.x == 0) {
  uint* finished = (uint*)splits + row * (2 + gridDim.x) + 2 + blockIdx.x;
  is_last = atomicInc(finished, pieces - 1) == pieces - 1;
}
__syncthreads();
if (!is_last) return;
__threadfence();

// A thread merges 4 dimensions of a column, as many pieces at a time as their loads, which take as long as
// all the rest, can be under way together.
constexpr int AT_ONCE = 16;
const size_t stride = size_t(queries) * H;  // from a piece to the next
for (int i = int(threadIdx.x); i < columns * (DV / 4); i += 32 * SG) {
  const int column = i / (DV / 4), dim = i % (DV / 4) * 4;
  const int query = (first_column + column) / GROUP;
  const int head = kv_head * GROUP + (first_column + column) % GROUP;
  const size_t from = (size_t(first_piece) * queries + query) * H + head;
  float highest = SINKS ? float(sinks[head]) : -INFINITY;
  float all = SINKS ? 1.0f : 0.0f;
  float4 sum = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
  ROLLED for (int first = 0; first < pieces; first += AT_ONCE) {
    float x[AT_ONCE];
    float4 part[AT_ONCE];
    UNROLL for (int p = 0; p < AT_ONCE; p++) {
      const size_t at = from + (first + p) * stride;
      x[p] = first + p < pieces ? __ldcg(lse + at) : -INFINITY;
      part[p] = first + p < pieces ? __ldcg((const float4*)(out + at * DV + dim)) : make_float4(0, 0, 0, 0);
    }
    const float before = highest;
    UNROLL for (int p = 0; p < AT_ONCE; p++) highest = max(highest, x[p]);
    const float reference = highest == -INFINITY ? 0.0f : highest;
    const float shrink = fast::exp2((before - reference) * FLOAT_LOG2E);
    all *= shrink;
    sum = make_float4(sum.x * shrink, sum.y * shrink, sum.z * shrink, sum.w * shrink);
    UNROLL for (int p = 0; p < AT_ONCE; p++) {
      const float w = fast::exp2((x[p] - reference) * FLOAT_LOG2E);
      all += w;
      sum.x += w * part[p].x;
      sum.y += w * part[p].y;
      sum.z += w * part[p].z;
      sum.w += w * part[p].w;
    }
  }
  if (dim == 0) {
    merged_lse[(size_t(row) * queries + query) * H + head] = all > 0.0f ? highest + log(all) : -INFINITY;
  }
  const float share = all > 0.0f ? 1.0f / all : 0.0f;
  const size_t to = ((size_t(row) * queries + query) * H + head) * DV + dim;
  merged[to] = R(sum.x * share);
  merged[to + 1] = R(sum.y * share);
  merged[to + 2] = R(sum.z * share);
  merged[to + 3] = R(sum.w * share);
}
