// Causal attention of a target's rows over the caches of their sequences, in chunks that begin at fixed positions.

#include "running.h"

namespace {

constexpr int64_t TOGETHER = 8; // rows of a sequence that share a pass over its keys

struct Block {
  int64_t first, rows;
};

struct Shape {
  int64_t heads, kv_heads, width, chunk;
  float scale;
};

// One block of rows and one key-value head.
void attend(const float *qkv, const Block &block, int64_t head, const Shape &shape, const float *keys,
            const float *values, const int64_t *positions, float *out, std::vector<float> &room) {
  const int64_t group = shape.heads / shape.kv_heads, width = shape.width, chunk = shape.chunk;
  const int64_t row = (shape.heads + 2 * shape.kv_heads) * width, queries = block.rows * group;
  Running running(room, queries, width, width, chunk);
  for (int64_t q = 0; q < queries; ++q) {
    const float *from = qkv + (block.first + q / group) * row + (head * group + q % group) * width;
    for (int64_t i = 0; i < width; ++i)
      running.query_row(q)[i] = from[i] * shape.scale;
  }
  const int64_t last = positions[block.first + block.rows - 1];
  for (int64_t begin = 0; begin <= last; begin += chunk) {
    const int64_t place = (begin / chunk * shape.kv_heads + head) * chunk * width;
    running.see(keys + place, values + place, width, last + 1 - begin < chunk ? last + 1 - begin : chunk,
                [&](int64_t q) { return positions[block.first + q / group] + 1 - begin; });
  }
  for (int64_t q = 0; q < queries; ++q) {
    float *to = out + (block.first + q / group) * shape.heads * width + (q % group * shape.kv_heads + head) * width;
    memcpy(to, running.finish(q), width * sizeof(float));
  }
}

} // namespace

// qkv as k3dspark_store left it; positions of a sequence's rows ascend. out [rows, heads · width], heads in the order
// (group, kv_head).
extern "C" void k3dspark_attend(const float *qkv, int64_t rows, int64_t heads, int64_t kv_heads, int64_t width,
                                const int64_t *positions, const float *const *keys, const float *const *values,
                                int64_t chunk, float scale, float *out, int64_t threads) {
  const Shape shape{heads, kv_heads, width, chunk, scale};
  std::vector<Block> blocks;
  for (int64_t r = 0; r < rows; ++r)
    if (!blocks.empty() && keys[r] == keys[r - 1] && blocks.back().rows < TOGETHER)
      ++blocks.back().rows;
    else
      blocks.push_back({r, 1});
  const int64_t units = (int64_t)blocks.size() * kv_heads;
#pragma omp parallel num_threads(threads)
  {
    std::vector<float> room;
#pragma omp for schedule(dynamic)
    for (int64_t unit = 0; unit < units; ++unit) {
      const Block &block = blocks[unit / kv_heads];
      attend(qkv, block, unit % kv_heads, shape, keys[block.first], values[block.first], positions, out, room);
    }
  }
}
