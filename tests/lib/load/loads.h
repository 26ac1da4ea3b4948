// Loads of samples, and the parts of tensors that ranks must get, cut by hand.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <memory>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "formats/load.h"
#include "formats/open.h"
#include "lib/load/load.h"
#include "tests/support/checkpoints.h"
#include "tests/support/must.h"

namespace reshard::loads {

// Computes torch.chunk(whole, n, dim)[k].
inline TensorValue chunk_of(const TensorValue& whole, int dim, Index n, Index k) {
  const Index size = whole.shape[dim], piece = ceil_div(size, n);
  const Index begin = std::min(size, k * piece), end = std::min(size, begin + piece);
  TensorValue out{whole.dtype, whole.shape, {}};
  out.shape[dim] = end - begin;
  const Index row = row_major_strides(whole.shape)[dim] * byte_size(whole.dtype);
  for (Index at = 0; at < std::ssize(whole.bytes); at += size * row)
    out.bytes +=
        whole.bytes.substr(static_cast<std::size_t>(at + begin * row), static_cast<std::size_t>((end - begin) * row));
  return out;
}

// Returns the dimension that tensor parallelism cuts in a Llama, in either convention; -1: none.
inline int tp_dim(const std::string& name) {
  for (const char* rows : {"wq.", "wk.", "wv.", "q_proj", "k_proj", "v_proj", "w1.", "w3.", "gate_proj", "up_proj",
                           "tok_embeddings", "embed_tokens", "lm_head"})
    if (name.find(rows) != std::string::npos) return 0;
  for (const char* columns : {"wo.", "o_proj", "w2.", "down_proj"})
    if (name.find(columns) != std::string::npos) return 1;
  return name.starts_with("output.") ? 0 : -1;
}

// Cuts a tensor by hand, for meshes of tp, dp_shard and dp_replicate.
inline TensorValue part_of(const TensorValue& whole, const std::string& name, const Mesh& mesh, Index rank) {
  TensorValue out = whole;
  if (out.shape.rank() == 0) return out;
  if (tp_dim(name) >= 0) out = chunk_of(out, tp_dim(name), mesh.size("tp"), mesh.coordinate(rank, "tp"));
  return chunk_of(out, 0, mesh.size("dp_shard"), mesh.coordinate(rank, "dp_shard"));
}

struct Loaded {
  TensorValues tensors;
  LoadReport report;
};

// Loads into new memory on the device of the options, which is first filled with a pattern.
inline Result<Loaded> load_all(const std::string& path, LoadOptions options) {
  Device& device = options.run.device ? *options.run.device : cpu_device();
  const auto stream = TRY(device.stream());
  Loaded out;
  std::vector<std::pair<TensorValue*, std::unique_ptr<Device::Memory>>> parts;
  out.report = TRY(load(path, std::move(options), [&](const LoadTensor& t) -> Result<Destination> {
    TensorValue& value = out.tensors[t.name] = {t.dtype, t.shape, {}};
    parts.emplace_back(&value, TRY(device.allocate(t.bytes())));
    const DeviceBuffer memory = parts.back().second->buffer();
    std::fill(memory.host.begin(), memory.host.end(), std::byte{0xA5});
    TRY(stream->upload(memory, t.bytes()));
    TRY(stream->wait());
    return Destination{memory.device.data(), std::nullopt};
  }));
  for (const auto& [value, memory] : parts) {
    const MutableBytes bytes = memory->buffer().host;
    TRY(stream->download(memory->buffer(), std::ssize(bytes)));
    TRY(stream->wait());
    value->bytes.assign(reinterpret_cast<const char*>(bytes.data()), bytes.size());
  }
  return out;
}

inline void expect_equal(const TensorValue& got, const TensorValue& expected, const std::string& what) {
  EXPECT_EQ(got.dtype, expected.dtype) << what;
  EXPECT_EQ(got.shape, expected.shape) << what;
  EXPECT_TRUE(got.bytes == expected.bytes) << what;
}

inline void expect_parts(const Loaded& loaded, const TensorValues& truth, const Mesh& mesh, Index rank) {
  for (const auto& [name, value] : loaded.tensors) {
    ASSERT_TRUE(truth.contains(name)) << name;
    expect_equal(value, part_of(truth.at(name), name, mesh, rank),
                 name + " of rank " + std::to_string(rank) + " of " + mesh.to_string());
  }
}

inline LoadOptions options_for(const std::string& mesh, Index rank = 0) {
  LoadOptions options;
  options.placement.mesh = must(Mesh::parse(mesh));
  options.rank = rank;
  options.run.threads = 2;
  options.run.memory = 16 << 20;
  return options;
}

inline std::set<std::string> names_of(const TensorValues& tensors) {
  std::set<std::string> out;
  for (const auto& [name, value] : tensors) out.insert(name);
  return out;
}

}  // namespace reshard::loads
