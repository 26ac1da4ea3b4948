// What each rank gets of a checkpoint, against whole tensors that are cut up by hand.
#include "lib/reshard/load.h"

#include <gmock/gmock.h>

#include <cstring>
#include <map>
#include <set>

#include "formats/load.h"
#include "lib/reshard/exchange_schedule.h"
#include "lib/transport/local.h"
#include "tests/support/checkpoints.h"
#include "tests/support/temp_dir.h"

namespace reshard {
namespace {

using testing::HasSubstr;

template <class T>
T must(Result<T> r) {
  if (!r) {
    ADD_FAILURE() << r.error().message();
    std::abort();
  }
  return *std::move(r);
}

std::string checkpoint(const std::string& name) { return sample(name) + "/checkpoint"; }

// torch.chunk(whole, n, dim)[k], element by element.
TensorValue chunk_of(const TensorValue& whole, int dim, Index n, Index k) {
  const Interval rows = chunk(whole.shape[dim], n, k);
  TensorValue out{whole.dtype, whole.shape, {}};
  out.shape[dim] = rows.end - rows.begin;
  const auto element = static_cast<std::size_t>(byte_size(whole.dtype));
  const Dims strides = row_major_strides(whole.shape);
  for (Index i = 0; i < volume(whole.shape); ++i) {
    const Index at = i / strides[dim] % whole.shape[dim];
    if (at >= rows.begin && at < rows.end)
      out.bytes += whole.bytes.substr(static_cast<std::size_t>(i) * element, element);
  }
  return out;
}

// The dimension that tensor parallelism cuts in a Llama, under either naming; -1: none.
int tp_dim(const std::string& name) {
  for (const char* rows : {"wq.", "wk.", "wv.", "q_proj", "k_proj", "v_proj", "w1.", "w3.", "gate_proj", "up_proj",
                           "tok_embeddings", "embed_tokens", "lm_head"})
    if (name.find(rows) != std::string::npos) return 0;
  for (const char* columns : {"wo.", "o_proj", "w2.", "down_proj"})
    if (name.find(columns) != std::string::npos) return 1;
  return name.starts_with("output.") ? 0 : -1;
}

TensorValue part_of(const TensorValue& whole, const std::string& name, const Mesh& mesh, Index rank) {
  TensorValue out = whole;
  if (out.shape.rank() == 0) return out;
  if (tp_dim(name) >= 0) out = chunk_of(out, tp_dim(name), mesh.size("tp"), mesh.coordinate(rank, "tp"));
  return chunk_of(out, 0, mesh.size("dp_shard"), mesh.coordinate(rank, "dp_shard"));
}

struct Loaded {
  TensorValues tensors;
  LoadReport report;
};

// Loads into memory of its own, filled with a pattern first.
Result<Loaded> load_all(const std::string& path, LoadOptions options) {
  Loaded out;
  std::map<std::string, TensorValue*> parts;
  out.report = TRY(load(path, std::move(options), [&](const LoadTensor& t) -> Result<Destination> {
    TensorValue& value = out.tensors[t.name];
    value = {t.dtype, t.shape, std::string(static_cast<std::size_t>(t.bytes()), '\xA5')};
    return Destination{reinterpret_cast<std::byte*>(value.bytes.data()), std::nullopt};
  }));
  return out;
}

void expect_equal(const TensorValue& got, const TensorValue& expected, const std::string& what) {
  EXPECT_EQ(got.dtype, expected.dtype) << what;
  EXPECT_EQ(got.shape, expected.shape) << what;
  EXPECT_TRUE(got.bytes == expected.bytes) << what;
}

void expect_parts(const Loaded& loaded, const TensorValues& truth, const Mesh& mesh, Index rank) {
  for (const auto& [name, value] : loaded.tensors) {
    ASSERT_TRUE(truth.contains(name)) << name;
    expect_equal(value, part_of(truth.at(name), name, mesh, rank),
                 name + " of rank " + std::to_string(rank) + " of " + mesh.to_string());
  }
}

LoadOptions options_for(const std::string& mesh, Index rank = 0) {
  LoadOptions options;
  options.mesh = must(Mesh::parse(mesh));
  options.rank = rank;
  options.threads = 2;
  options.memory = 16 << 20;
  return options;
}

std::set<std::string> names_of(const TensorValues& tensors) {
  std::set<std::string> out;
  for (const auto& [name, value] : tensors) out.insert(name);
  return out;
}

TEST(Load, GivesEachRankItsPartOfEveryTensor) {
  for (const std::string name : {"tp8", "fsdp4_tp2", "hsdp2x4", "pp2_tp4"}) {
    const TensorValues truth = load_checkpoint(sample(name) + "/full.safetensors");
    for (const std::string text : {"tp=2", "tp=2,dp_shard=3", "dp_shard=7", "dp_replicate=2,tp=2", "tp=8,dp_shard=2"}) {
      const Mesh mesh = must(Mesh::parse(text));
      for (Index rank = 0; rank < mesh.ranks(); rank += 1 + rank / 3) {
        LoadOptions options = options_for(text, rank);
        options.detect_family = false;  // by the cuts of the source: in fsdp ones dimension 0
        options.exclude = {"*wo.*", "*w2.*"};
        const Loaded loaded = must(load_all(checkpoint(name), options));
        expect_parts(loaded, truth, mesh, rank);
        if (options.mesh.size("tp") == 1) continue;
        options.detect_family = true;
        options.exclude.clear();
        if (truth.at("layers.0.attention.wk.weight").shape[0] / 8 < mesh.size("tp")) continue;  // heads are repeated
        const Loaded by_family = must(load_all(checkpoint(name), options));
        EXPECT_EQ(names_of(by_family.tensors), names_of(truth));
        expect_parts(by_family, truth, mesh, rank);
      }
    }
  }
}

}  // namespace
}  // namespace reshard
