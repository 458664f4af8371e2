// One threadgroup per query and head: the results over pieces, weighted by their share of the softmax.
// splits: per row, first item and number of items. SG: simdgroups, which take turns at the pieces.

constexpr int PARTS = (DV + 31) / 32;
const int head = int(threadgroup_position_in_grid.x);
const int token = int(threadgroup_position_in_grid.y);  // row * queries + query
const int lane = int(thread_index_in_simdgroup);
const int sg = int(simdgroup_index_in_threadgroup);
const int queries = lses_shape[1];
const int row = token / queries, query = token % queries;
const int first = splits[row * splits_shape[1]], count = splits[row * splits_shape[1] + 1];
const size_t stride = size_t(queries) * H;  // from a piece to the next
const size_t start = (size_t(first) * queries + query) * H + head;

float peak = -INFINITY;
for (int i = lane; i < count; i += 32) peak = max(peak, lses[start + i * stride]);
peak = simd_max(peak);
const float sink = SINKS ? float(sinks[head]) : -INFINITY;
peak = max(peak, sink);
const float reference = peak == -INFINITY ? 0.0f : peak;

float total = 0.0f;
float sums[PARTS];
UNROLL for (int d = 0; d < PARTS; d++) sums[d] = 0.0f;
for (int base = sg; base < count; base += 32 * SG) {
  const int mine = base + lane * SG;
  const float weight = mine < count ? fast::exp2((lses[start + mine * stride] - reference) * FLOAT_LOG2E) : 0.0f;
  total += weight;
  const int many = min(32, (count - base + SG - 1) / SG);
  UNROLL_BY_4 for (int j = 0; j < many; j++) {
    const float w = shuffle(weight, j);
    UNROLL for (int d = 0; d < PARTS; d++) {
      const int dim = d * 32 + lane;
      if (dim < DV) sums[d] += w * parts[(start + (base + j * SG) * stride) * DV + dim];
    }
  }
}
total = simd_sum(total);

threadgroup float totals[SG];
threadgroup float results[SG][PARTS * 32];
if (lane == 0) totals[sg] = total;
UNROLL for (int d = 0; d < PARTS; d++) results[sg][d * 32 + lane] = sums[d];
threadgroup_barrier(mem_flags::mem_threadgroup);

float whole = fast::exp2((sink - reference) * FLOAT_LOG2E);
UNROLL for (int s = 0; s < SG; s++) whole += totals[s];
const size_t to = size_t(token) * H + head;
for (int dim = int(thread_index_in_threadgroup); dim < DV; dim += 32 * SG) {
  float sum = 0.0f;
  UNROLL for (int s = 0; s < SG; s++) sum += results[s][dim];
  out[to * DV + dim] = T(whole > 0.0f ? sum / whole : 0.0f);
}
if (lane == 0 && sg == 0) lse[to] = whole > 0.0f ? peak + log(whole) : -INFINITY;
