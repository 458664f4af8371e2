// One thread per token, kv head and dimension: the new keys and values into their slots, in place.
// Slots of block 0, the null block, are rubbish bins: nothing reads them, so nothing is written.

constexpr int DIMS = DK > DV ? DK : DV;
const int at = int(thread_position_in_grid.x);
const int token = int(thread_position_in_grid.y);
const int head = at / DIMS, dim = at % DIMS;
const int slot = slots[token];
if (head < KH && slot >= BS) {
  const int row = token / k_shape[2], query = token % k_shape[2];
  const size_t line = (size_t(slot / BS) * KH + head) * BS + slot % BS;
  if (dim < DK) {
    ((device S*)k_pool)[line * DK + dim] = S(float(
        k[size_t(row) * k_strides[0] + size_t(head) * k_strides[1] + size_t(query) * k_strides[2] +
          size_t(dim) * k_strides[3]]));
  }
  if (dim < DV) {
    ((device S*)v_pool)[line * DV + dim] = S(float(
        v[size_t(row) * v_strides[0] + size_t(head) * v_strides[1] + size_t(query) * v_strides[2] +
          size_t(dim) * v_strides[3]]));
  }
}
if (at == 0 && token == 0) done[0] = 0.0f;
