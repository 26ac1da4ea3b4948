#include "formats/encoding/distributed_tensor.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <functional>
#include <numeric>
#include <random>

#include "formats/encoding/pickle_writer.h"
#include "formats/encoding/tensor_file.h"
#include "formats/encoding/zip.h"
#include "tests/support/temp_dir.h"

namespace reshard::distributed_tensor_test {
namespace {

using pickle::PickleWriter;
using testing::AllOf;
using testing::HasSubstr;

constexpr Index kStorage = 4096;  // elements

// The description of a DTensor to build.
struct Spec {
  Dims shape, local;
  std::vector<Index> mesh, coordinate;
  // Each axis: "R", "S0" or "T0/2", a _StridedShard with its factor; other names as they are.
  std::vector<std::string> placements;
  bool is_old = false;         // whether the mesh is stored as in torch 2.6
  bool has_coordinate = true;  // false: the rank is not in the mesh
  std::string dtype = "float32";
};

void integers_tensor(PickleWriter& w, const std::string& storage, const std::string& key, const Dims& shape) {
  w.global("torch._utils", "_rebuild_tensor_v2");
  w.mark();
  w.mark();
  w.text("storage");
  w.global("torch", storage);
  w.text(key);
  w.text("cpu");
  w.integer(kStorage);
  w.tuple_from_mark();
  w.persistent_id();
  w.integer(0);
  w.integers(shape.span());
  w.integers(row_major_strides(shape).span());
  w.boolean(false);
  w.global("collections", "OrderedDict");
  w.empty_tuple();
  w.reduce();
  w.tuple_from_mark();
  w.reduce();
}

// Writes an object of a class; `attributes` writes keys and values in turn.
void object(PickleWriter& w, const std::string& module, const std::string& name,
            const std::function<void()>& attributes) {
  w.global(module, name);
  w.empty_tuple();
  w.new_object();
  w.empty_dict();
  w.mark();
  attributes();
  w.set_items();
  w.build();
}

void placement(PickleWriter& w, const std::string& text) {
  const bool is_cut = text[0] == 'S' || text[0] == 'T';
  const std::string name = text == "R" ? "Replicate" : text[0] == 'S' ? "Shard" : is_cut ? "_StridedShard" : text;
  object(w, "torch.distributed.tensor.placement_types", name, [&] {
    const std::size_t slash = text.find('/');
    if (is_cut) w.text("dim");
    if (is_cut) w.integer(std::stoll(text.substr(1, slash - 1)));
    if (is_cut && slash != std::string::npos) w.text("split_factor");
    if (is_cut && slash != std::string::npos) w.integer(std::stoll(text.substr(slash + 1)));
  });
}

void mesh(PickleWriter& w, const Spec& s) {
  object(w, "torch.distributed.device_mesh", "DeviceMesh", [&] {
    if (s.is_old) {
      w.text("mesh");
      integers_tensor(w, "IntStorage", "1", Dims(std::span<const Index>(s.mesh)));
    } else {
      w.text("_layout");
      object(w, "torch.distributed._mesh_layout", "_MeshLayout", [&] {
        w.text("axes");
        w.mark();
        for (const Index n : s.mesh)
          object(w, "torch.distributed._mesh_layout", "_FlatLayout", [&] {
            w.text("shape");
            w.integers(std::vector<Index>{n});
          });
        w.tuple_from_mark();
      });
    }
    w.text("_coordinate_on_dim");
    if (s.has_coordinate) {
      w.integers(s.coordinate);
    } else {
      w.none();
    }
  });
}

std::string pickle_of(const Spec& s) {
  PickleWriter w;
  w.empty_dict();
  w.mark();
  w.text("w");
  w.global("torch._tensor", "_rebuild_from_type_v2");
  w.mark();
  w.global("torch._utils", "_rebuild_wrapper_subclass");
  w.global("torch.distributed.tensor", "DTensor");
  w.mark();
  w.global("torch.distributed.tensor", "DTensor");
  w.global("torch", s.dtype);
  w.integers(s.shape.span());
  w.integers((checked_volume(s.shape) ? row_major_strides(s.shape) : s.shape).span());
  w.tuple_from_mark();
  w.none();
  w.empty_dict();
  w.mark();
  w.text("_local_tensor");
  integers_tensor(w, "FloatStorage", "0", s.local);
  w.text("_spec");
  object(w, "torch.distributed.tensor._dtensor_spec", "DTensorSpec", [&] {
    w.text("mesh");
    mesh(w, s);
    w.text("placements");
    w.mark();
    for (const std::string& p : s.placements) placement(w, p);
    w.tuple_from_mark();
  });
  w.set_items();
  w.tuple_of_last(2);
  w.tuple_from_mark();
  w.reduce();
  w.set_items();
  return std::move(w).finish();
}

std::string archive_of(const std::string& pickle) {
  zip::Builder builder(0);
  builder.add("archive/data.pkl", pickle);
  builder.add("archive/data/0", std::string(4 * kStorage, '\0'));
  builder.add("archive/data/1", std::string(4 * kStorage, '\0'));
  return std::move(builder).finish().before;
}

class DistributedTensorTest : public testing::Test {
 protected:
  Result<TensorFile> open(const Spec& s, TensorFile::Parts parts = TensorFile::Parts::kRead) {
    return TensorFile::open(*File::open(dir_.write("f", archive_of(pickle_of(s)))), SafetensorsEnd::kExact, parts);
  }
  std::string refusal(const Spec& s, TensorFile::Parts parts = TensorFile::Parts::kRead) {
    const auto file = open(s, parts);
    return file ? "accepted" : file.error().message();
  }
  TempDir dir_;
};

using List = std::vector<Index>;

// Returns torch.chunk of the numbers themselves.
List piece_of(const List& all, Index n, Index k) {
  const auto size = static_cast<Index>(all.size());
  const Index each = (size + n - 1) / n;
  const auto at = [&](Index i) { return all.begin() + std::min(size, i * each); };
  return {at(k), at(k + 1)};
}

// Cuts a tensor axis by axis, in every order that torch's placements can express. The rows and columns that remain must
// be those of the box.
TEST_F(DistributedTensorTest, BoxesAreWhatCuttingOneAxisAfterTheOtherLeaves) {
  std::mt19937 random(5);
  const auto pick = [&](Index n) { return static_cast<Index>(random() % static_cast<std::uint32_t>(n)); };
  for (int round = 0; round < 1500; ++round) {
    Spec s;
    s.is_old = pick(2) == 0;
    const int rank = 1 + static_cast<int>(pick(3));
    for (int d = 0; d < rank; ++d) s.shape.push_back(pick(14));
    std::vector<int> dims;  // the dimension that each axis cuts; -1: none
    for (Index i = 1 + pick(4); i > 0; --i) {
      s.mesh.push_back(1 + pick(4));
      s.coordinate.push_back(pick(s.mesh.back()));
      dims.push_back(static_cast<int>(pick(rank + 1)) - 1);
      s.placements.emplace_back("R");
    }
    Box box = whole(s.shape);
    for (int d = 0; d < rank; ++d) {
      std::vector<std::size_t> first, later;  // axes in the order of the cuts
      for (std::size_t i = 0; i < dims.size(); ++i) {
        if (dims[i] != d) continue;
        const bool is_last = std::find(dims.begin() + static_cast<std::ptrdiff_t>(i) + 1, dims.end(), d) == dims.end();
        const bool is_strided = !is_last && pick(2) == 0;
        (is_strided ? later : first).push_back(i);
      }
      for (const std::size_t i : first) s.placements[i] = "S" + std::to_string(d);
      std::reverse(later.begin(), later.end());
      for (const std::size_t i : later) {
        Index factor = 1;
        for (const std::size_t k : first) factor *= k > i ? s.mesh[k] : 1;
        s.placements[i] = "T" + std::to_string(d) + "/" + std::to_string(factor);
      }
      List left(static_cast<std::size_t>(s.shape[d]));
      std::iota(left.begin(), left.end(), 0);
      first.insert(first.end(), later.begin(), later.end());
      for (const std::size_t i : first) left = piece_of(left, s.mesh[i], s.coordinate[i]);
      box.origin[d] = left.empty() ? s.shape[d] : left.front();
      box.shape[d] = static_cast<Index>(left.size());
    }
    s.local = box.shape;
    const auto file = open(s);
    ASSERT_TRUE(file) << file.error().message();
    const DistributedTensor& t = *file->tensors().front().distributed;
    EXPECT_EQ(t.shape, s.shape);
    if (volume(s.shape) == 0) {
      EXPECT_TRUE(t.is_whole());
    } else if (box.empty()) {
      EXPECT_TRUE(t.parts.empty()) << t.layout();
    } else {
      ASSERT_EQ(t.parts.size(), 1U);
      EXPECT_EQ(t.parts.front().box, box) << t.layout();
    }
  }
}

TEST_F(DistributedTensorTest, SaysWhereItIsFrom) {
  const auto file = open({{6, 4}, {3, 2}, {2, 2}, {1, 0}, {"S0", "S1"}});
  ASSERT_TRUE(file) << file.error().message();
  const DistributedTensor& t = *file->tensors().front().distributed;
  EXPECT_EQ(t.layout(), "Shard(0), Shard(1) on 2, 2");
  EXPECT_EQ(t.ranks, 4);
  EXPECT_EQ(t.shards, 0);
  const auto hsdp = open({{6, 4}, {3, 4}, {2, 2}, {1, 0}, {"R", "S0"}});
  ASSERT_TRUE(hsdp) << hsdp.error().message();
  EXPECT_EQ(hsdp->tensors().front().distributed->shards, 2);
  EXPECT_EQ(hsdp->tensors().front().distributed->shard, 0);
  Spec outside{{6, 4}, {0, 4}, {2}, {}, {"S0"}};
  outside.has_coordinate = false;
  const auto none = open(outside);
  ASSERT_TRUE(none) << none.error().message();
  EXPECT_TRUE(none->tensors().front().distributed->parts.empty());
}

// On a mesh of one rank, or if replicated, a DTensor is an ordinary tensor.
TEST_F(DistributedTensorTest, AWholeOneIsATensorToEveryReader) {
  const auto file = open({{6, 4}, {6, 4}, {2, 1}, {1, 0}, {"R", "S0"}}, TensorFile::Parts::kRefuse);
  ASSERT_TRUE(file) << file.error().message();
  EXPECT_FALSE(file->tensors().front().distributed);
  EXPECT_EQ(file->tensors().front().tensor.shape(), (Dims{6, 4}));
  EXPECT_THAT(
      refusal({{6, 4}, {3, 4}, {2}, {1}, {"S0"}}, TensorFile::Parts::kRefuse),
      AllOf(HasSubstr("tensor 'w': the file contains [3:6, 0:4] of [6, 4], the part of one rank (Shard(0) on 2)"),
            HasSubstr("full_tensor()")));
}

TEST_F(DistributedTensorTest, WhatCannotBeIsRefused) {
  EXPECT_THAT(refusal({{6, 4}, {2, 4}, {2}, {1}, {"S0"}}),
              HasSubstr("expected a local part of [3, 4], which is [3:6, 0:4] of [6, 4] (Shard(0) on 2), got [2, 4]"));
  EXPECT_THAT(refusal({{6, 4}, {3, 4}, {2}, {2}, {"S0"}}), HasSubstr("a place in a mesh of 1 axes"));
  EXPECT_THAT(refusal({{6, 4}, {3, 4}, {2}, {1, 0}, {"S0"}}), HasSubstr("a place in a mesh of 1 axes"));
  EXPECT_THAT(refusal({{6, 4}, {3, 4}, {2}, {1}, {"S0", "R"}}), HasSubstr("one for each of the mesh's 1 axes"));
  EXPECT_THAT(refusal({{6, 4}, {3, 4}, {2}, {1}, {"S2"}}), HasSubstr("one of the tensor's 2 dimensions"));
  EXPECT_THAT(refusal({{6, 4}, {6, 4}, {2}, {1}, {"Partial"}}), HasSubstr("Shard, _StridedShard or Replicate"));
  EXPECT_THAT(refusal({{6, 4}, {3, 4}, {2}, {1}, {"T0/3"}}), HasSubstr("a split_factor of 1"));
  EXPECT_THAT(refusal({{6, 4}, {3, 4}, {2}, {1}, {"T0/0"}}), HasSubstr("a split_factor of 1 or more"));
  EXPECT_THAT(refusal({{6, 4}, {3, 4}, {Index{1} << 40}, {1}, {"S0"}}), HasSubstr("a size from 1 to 1,000,000"));
  EXPECT_THAT(refusal({{6, 4}, {3, 4}, {1000, 1001}, {1, 0}, {"S0", "R"}}), HasSubstr("1,000,000 ranks together"));
  EXPECT_THAT(refusal({{Index{1} << 40, Index{1} << 40}, {3, 4}, {2}, {1}, {"S0"}}),
              HasSubstr("fewer than 2^63 bytes"));
  Spec other{{6, 4}, {3, 4}, {2}, {1}, {"S0"}};
  other.dtype = "bfloat16";
  EXPECT_THAT(refusal(other), HasSubstr("expected a local part of torch.bfloat16, got torch.float32"));
  other.dtype = "nonsense";
  EXPECT_THAT(refusal(other), HasSubstr("dtype torch.nonsense is not supported"));
}

// A ShardedTensor's boxes are checked against the whole tensor.
TEST_F(DistributedTensorTest, ShardsLieInsideTheWhole) {
  const auto said = [&](const List& offsets, const List& sizes) {
    PickleWriter w;
    w.global("torch._tensor", "_rebuild_from_type_v2");
    w.mark();
    w.global("torch._utils", "_rebuild_wrapper_subclass");
    w.global("torch.distributed._shard.sharded_tensor.api", "ShardedTensor");
    w.mark();
    w.none();
    w.global("torch", "float32");
    w.integers(List{5, 3});
    w.integers(List{3, 1});
    w.tuple_from_mark();
    w.mark();
    w.empty_list();
    w.mark();
    object(w, "torch.distributed._shard.sharded_tensor.shard", "Shard", [&] {
      w.text("tensor");
      integers_tensor(w, "FloatStorage", "0", Dims(std::span<const Index>(sizes)));
      w.text("metadata");
      object(w, "torch.distributed._shard.metadata", "ShardMetadata", [&] {
        w.text("shard_offsets");
        w.integers(offsets);
        w.text("shard_sizes");
        w.integers(sizes);
      });
    });
    w.append_items();
    w.none();
    w.none();
    w.tuple_from_mark();
    w.tuple_from_mark();
    w.reduce();
    const auto file = TensorFile::open(*File::open(dir_.write("f", archive_of(std::move(w).finish()))),
                                       SafetensorsEnd::kExact, TensorFile::Parts::kRead);
    if (!file) return file.error().message();
    std::string out;
    for (const StoredTensor& part : file->tensors().front().distributed->parts) out += to_string(part.box);
    return out;
  };
  EXPECT_EQ(said({3, 0}, {2, 3}), "[3:5, 0:3]");
  EXPECT_EQ(said({5, 0}, {0, 3}), "");
  EXPECT_THAT(said({4, 0}, {2, 3}), HasSubstr("a box inside [5, 3]"));
  EXPECT_THAT(said({INT64_MAX, 0}, {2, 3}), HasSubstr("a box inside [5, 3]"));
  EXPECT_THAT(said({3}, {2}), HasSubstr("a box inside [5, 3]"));
}

}  // namespace
}  // namespace reshard::distributed_tensor_test
