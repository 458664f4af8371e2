// One thread per 16 bytes of a position and kv head: positions span[0] .. span[1] - 1 of one row,
// contiguous as [kv_heads, positions, head_dim].

constexpr int KEY_PARTS = DK * int(sizeof(S)) / 16, VALUE_PARTS = DV * int(sizeof(S)) / 16;
constexpr int PARTS = KEY_PARTS > VALUE_PARTS ? KEY_PARTS : VALUE_PARTS;
const int at = int(thread_position_in_grid.x);
const int head = int(thread_position_in_grid.y);
const int index = at / PARTS, part = at % PARTS;
const int length = span[1] - span[0];
if (index < length) {
  const int position = span[0] + index;
  const size_t from = (size_t(block_table[position / BS]) * KH + head) * BS + position % BS;
  const size_t to = size_t(head) * length + index;
  if (part < KEY_PARTS) {
    copy_16_bytes((device char*)keys + (to * KEY_PARTS + part) * 16, (const device char*)k_pool + (from * KEY_PARTS + part) * 16);
  }
  if (part < VALUE_PARTS) {
    copy_16_bytes(
        (device char*)values + (to * VALUE_PARTS + part) * 16,
        (const device char*)v_pool + (from * VALUE_PARTS + part) * 16);
  }
}
if (at == 0 && head == 0) done[0] = 0.0f;
