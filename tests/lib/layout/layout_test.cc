#include "lib/layout/layout.h"

#include <gtest/gtest.h>

#include <map>
#include <numeric>
#include <random>
#include <set>

#include "lib/base/text.h"
#include "tests/support/soak.h"

namespace reshard::layout_test {
namespace {

// ---- Mesh

std::string parse_error(std::string_view text) {
  const auto mesh = Mesh::parse(text);
  if (mesh) return "parsed as " + mesh->to_string();
  EXPECT_EQ(mesh.error().code(), ErrorCode::kUsage);
  return mesh.error().message();
}

TEST(Mesh, ParsePutsAxesIntoTheOrderOfRanks) {
  const Mesh mesh = *Mesh::parse("tp=4,pp=3,dp_shard=2");
  EXPECT_EQ(mesh.axes(), (std::vector<MeshAxis>{{"pp", 3}, {"dp_shard", 2}, {"tp", 4}}));
  EXPECT_EQ(mesh.ranks(), 24);
  EXPECT_EQ(mesh.size("tp"), 4);
  EXPECT_EQ(mesh.size("cp"), 1);
  EXPECT_EQ(mesh.to_string(), "pp=3, dp_shard=2, tp=4");
  EXPECT_EQ(Mesh::parse("ep=2,tp=2,cp=2")->to_string(), "cp=2, tp=2, ep=2");
}

TEST(Mesh, AxesOfOneRankVanish) {
  EXPECT_EQ(Mesh::parse("tp=1,cp=2")->to_string(), "cp=2");
  EXPECT_EQ(Mesh::parse("tp=1")->to_string(), "one rank");
  EXPECT_EQ(Mesh().ranks(), 1);
}

TEST(Mesh, ParseSaysWhatIsWrong) {
  EXPECT_EQ(parse_error(""), "mesh '': expected axis=size with axes pp, dp_replicate, dp_shard, cp, tp, ep, got ''");
  EXPECT_EQ(parse_error("tp=2,xp=4"),
            "mesh 'tp=2,xp=4': expected axis=size with axes pp, dp_replicate, dp_shard, cp, tp, ep, got 'xp=4'");
  EXPECT_EQ(parse_error("tp"),
            "mesh 'tp': expected axis=size with axes pp, dp_replicate, dp_shard, cp, tp, ep, got 'tp'");
  EXPECT_EQ(parse_error("tp=2,"),
            "mesh 'tp=2,': expected axis=size with axes pp, dp_replicate, dp_shard, cp, tp, ep, got ''");
  EXPECT_EQ(parse_error("tp=0"), "mesh axis 'tp': expected a size from 1 to 1,000,000, got '0'");
  EXPECT_EQ(parse_error("tp=-2"), "mesh axis 'tp': expected a size from 1 to 1,000,000, got '-2'");
  EXPECT_EQ(parse_error("tp="), "mesh axis 'tp': expected a size from 1 to 1,000,000, got ''");
  EXPECT_EQ(parse_error("tp=2x"), "mesh axis 'tp': expected a size from 1 to 1,000,000, got '2x'");
  EXPECT_EQ(parse_error("tp=99999999999999999999"),
            "mesh axis 'tp': expected a size from 1 to 1,000,000, got '99999999999999999999'");
  EXPECT_EQ(parse_error("tp=2,tp=2"), "mesh axis 'tp' is given twice");
  EXPECT_EQ(parse_error("tp=1,tp=2"), "mesh axis 'tp' is given twice");
  EXPECT_EQ(parse_error("tp=1001,dp_shard=1000"), "mesh 'tp=1001,dp_shard=1000': expected at most 1,000,000 ranks");
  EXPECT_EQ(parse_error("pp=1000000,dp_replicate=1000000,dp_shard=1000000,cp=1000000"),
            "mesh 'pp=1000000,dp_replicate=1000000,dp_shard=1000000,cp=1000000': expected at most 1,000,000 ranks");
  EXPECT_EQ(parse_error("\x1b[2J=3"),
            "mesh '\\x1b[2J=3': expected axis=size with axes pp, dp_replicate, dp_shard, cp, tp, ep, got '\\x1b[2J=3'");
}

TEST(Mesh, TheLastAxisIsTheFastest) {
  const Mesh mesh = *Mesh::parse("pp=2,dp_shard=3,tp=4");
  Index rank = 0;
  for (Index pp = 0; pp < 2; ++pp)
    for (Index dp = 0; dp < 3; ++dp)
      for (Index tp = 0; tp < 4; ++tp, ++rank) {
        EXPECT_EQ(mesh.coordinate(rank, "pp"), pp);
        EXPECT_EQ(mesh.coordinate(rank, "dp_shard"), dp);
        EXPECT_EQ(mesh.coordinate(rank, "tp"), tp);
        EXPECT_EQ(mesh.coordinate(rank, "cp"), 0);
      }
}

// ---- chunk

TEST(Chunk, RoundsUpAndLeavesTheLastOnesShortOrEmpty) {
  const auto lengths = [](Index size, Index n) {
    std::vector<Index> out;
    for (Index k = 0; k < n; ++k) out.push_back(chunk(size, n, k).end - chunk(size, n, k).begin);
    return out;
  };
  EXPECT_EQ(lengths(5, 4), (std::vector<Index>{2, 2, 1, 0}));
  EXPECT_EQ(lengths(2, 4), (std::vector<Index>{1, 1, 0, 0}));
  EXPECT_EQ(lengths(0, 3), (std::vector<Index>{0, 0, 0}));
  EXPECT_EQ(lengths(257, 8), (std::vector<Index>{33, 33, 33, 33, 33, 33, 33, 26}));
  EXPECT_EQ(chunk(5, 4, 3).begin, 5);
}

TEST(Chunk, DoesNotOverflowAtTheTop) {
  Index next = 0;
  for (Index k = 0; k < 4; ++k) {
    const Interval piece = chunk(INT64_MAX, 4, k);
    EXPECT_EQ(piece.begin, next);
    next = piece.end;
  }
  EXPECT_EQ(next, INT64_MAX);
  EXPECT_EQ(chunk(INT64_MAX, 1'000'000, 999'999).end, INT64_MAX);
}

// ---- owned(): compared with recorded results of torch

Mesh mesh_of(std::string_view text) { return *Mesh::parse(text); }

std::vector<Box> all_boxes(const Mesh& mesh, const Placement& placement, const Dims& shape) {
  std::vector<Box> out;
  for (Index r = 0; r < mesh.ranks(); ++r) out.push_back(*owned(mesh, placement, shape, r));
  return out;
}

TEST(Owned, WithoutSplitsEveryRankHoldsAll) {
  for (const Box& box : all_boxes(mesh_of("dp_shard=2,tp=2"), {}, {3, 4})) EXPECT_EQ(box, whole({3, 4}));
  EXPECT_EQ(*owned(Mesh(), {{{{"tp"}, 0}}}, {5}, 0), whole({5}));
}

TEST(Owned, AnEmptyShardStandsAtTheEndOfTheDimension) {
  // torch.chunk cuts 5 rows over 4 ranks.
  const auto boxes = all_boxes(mesh_of("dp_shard=4"), {{{{"dp_shard"}, 0}}}, {5, 2});
  EXPECT_EQ(boxes[0], (Box{{0, 0}, {2, 2}}));
  EXPECT_EQ(boxes[1], (Box{{2, 0}, {2, 2}}));
  EXPECT_EQ(boxes[2], (Box{{4, 0}, {1, 2}}));
  EXPECT_EQ(boxes[3], (Box{{5, 0}, {0, 2}}));
}

TEST(Owned, EmptyShardsOfSeveralCutsAllStandAtTheEnd) {
  // Two rows on 2 x 2 ranks: ranks 1 and 3 have nothing, and torch (since 2.8) puts both at row 2.
  const auto boxes = all_boxes(mesh_of("dp_shard=2,tp=2"), {{{{"dp_shard"}, 0}, {{"tp"}, 0}}}, {2});
  EXPECT_EQ(boxes, (std::vector<Box>{{{0}, {1}}, {{2}, {0}}, {{1}, {1}}, {{2}, {0}}}));
}

TEST(Owned, ShardsOfNothingStandAtZero) {
  for (const Box& box : all_boxes(mesh_of("tp=3"), {{{{"tp"}, 0}}}, {0, 4})) EXPECT_EQ(box, (Box{{0, 0}, {0, 4}}));
}

TEST(Owned, TwoSplitsOfTwoDimensionsMakeAGrid) {
  const auto boxes = all_boxes(mesh_of("dp_shard=2,tp=2"), {{{{"dp_shard"}, 0}, {{"tp"}, 1}}}, {4, 6});
  EXPECT_EQ(boxes, (std::vector<Box>{{{0, 0}, {2, 3}}, {{0, 3}, {2, 3}}, {{2, 0}, {2, 3}}, {{2, 3}, {2, 3}}}));
}

TEST(Owned, SplitsOfOneDimensionSubdivideLeftToRight) {
  const auto boxes = all_boxes(mesh_of("dp_shard=2,tp=2"), {{{{"dp_shard"}, 0}, {{"tp"}, 0}}}, {8});
  for (Index r = 0; r < 4; ++r) EXPECT_EQ(boxes[static_cast<std::size_t>(r)].origin[0], 2 * r);
}

TEST(Owned, Fsdp2OverTensorParallelIsTorchsStridedShard) {
  // [_StridedShard(0, split_factor=2), Shard(0)] on (dp, tp), 16 rows: ranks 0..3 start at 0, 8, 4, 12.
  const auto boxes = all_boxes(mesh_of("dp_shard=2,tp=2"), {{{{"tp"}, 0}, {{"dp_shard"}, 0}}}, {16, 3});
  EXPECT_EQ(boxes, (std::vector<Box>{{{0, 0}, {4, 3}}, {{8, 0}, {4, 3}}, {{4, 0}, {4, 3}}, {{12, 0}, {4, 3}}}));
}

TEST(Owned, SeveralAxesCutAsOneTheFirstTheSlowest) {
  // FSDP over dp_shard x cp gives each rank ceil(10 / 6) = 2 rows, not ceil(ceil(10 / 2) / 3).
  const auto boxes = all_boxes(mesh_of("dp_shard=2,cp=3"), {{{{"dp_shard", "cp"}, 0}}}, {10});
  for (Index r = 0; r < 6; ++r)
    EXPECT_EQ(boxes[static_cast<std::size_t>(r)], (Box{{std::min<Index>(10, 2 * r)}, {r < 5 ? 2 : 0}}));
}

TEST(Owned, AnotherPipelineStagesTensorIsNotOwnedAtAll) {
  const Mesh mesh = mesh_of("pp=2,tp=2");
  const Placement second{{{{"tp"}, 0}}, 1};
  EXPECT_EQ(owned(mesh, second, {4}, 0), std::nullopt);
  EXPECT_EQ(owned(mesh, second, {4}, 1), std::nullopt);
  EXPECT_EQ(owned(mesh, second, {4}, 2), (Box{{0}, {2}}));
  EXPECT_EQ(owned(mesh, second, {4}, 3), (Box{{2}, {2}}));
  EXPECT_EQ(owned(mesh_of("tp=2"), second, {4}, 1), (Box{{2}, {2}})) << "no pipeline, one stage";
}

// ---- owned against torch.chunk done to real arrays

// A local tensor: the elements of the whole that it holds, in row-major order.
struct LocalArray {
  Dims shape;
  std::vector<Index> elements;
};

// Computes torch.chunk(t, n, dim)[k] element by element. Pieces after torch's last one are empty.
LocalArray chunk_of(const LocalArray& t, Index n, int dim, Index k) {
  const Index size = t.shape[dim];
  const Index piece = std::max<Index>(1, (size + n - 1) / n);
  LocalArray out{t.shape, {}};
  out.shape[dim] = 0;
  for (Index i = k * piece; i < size && i < (k + 1) * piece; ++i) ++out.shape[dim];
  Index inner = 1;
  for (int d = dim + 1; d < t.shape.rank(); ++d) inner *= t.shape[d];
  for (std::size_t e = 0; e < t.elements.size(); ++e) {
    const Index along = static_cast<Index>(e) / inner % size;
    if (along / piece == k) out.elements.push_back(t.elements[e]);
  }
  return out;
}

std::vector<Index> elements_of(const Box& box, const Dims& shape) {
  const Dims strides = row_major_strides(shape);
  std::vector<Index> out = {0};
  for (int d = 0; d < shape.rank(); ++d) {
    std::vector<Index> next;
    for (const Index base : out)
      for (Index i = box.begin(d); i < box.end(d); ++i) next.push_back(base + i * strides[d]);
    out = std::move(next);
  }
  return out;
}

// Returns the coordinates of each rank, counted up like an odometer instead of computed by division.
std::vector<std::map<std::string, Index>> coordinates_of_ranks(const Mesh& mesh) {
  std::vector<std::map<std::string, Index>> ranks = {{}};
  for (const MeshAxis& axis : mesh.axes()) {
    std::vector<std::map<std::string, Index>> next;
    for (const auto& outer : ranks)
      for (Index i = 0; i < axis.size; ++i) {
        next.push_back(outer);
        next.back()[axis.name] = i;
      }
    ranks = std::move(next);
  }
  return ranks;
}

struct RandomCase {
  Mesh mesh;
  Placement placement;
  Dims shape;
};

RandomCase random_case(std::mt19937& rng) {
  static const std::vector<std::string> kAxes = {"pp", "dp_replicate", "dp_shard", "cp", "tp"};
  static const std::vector<Index> kPrimes = {101, 127, 257, 509, 1003, 1009};
  RandomCase c;
  std::vector<std::string> names = kAxes;
  std::shuffle(names.begin(), names.end(), rng);
  names.resize(rng() % 5);
  std::vector<MeshAxis> axes;
  for (const std::string& name : kAxes)
    if (std::find(names.begin(), names.end(), name) != names.end())
      axes.push_back({name, static_cast<Index>(1 + rng() % 5)});
  c.mesh = Mesh(axes);

  const int rank = 1 + static_cast<int>(rng() % 3);
  for (int d = 0; d < rank; ++d) c.shape.push_back(static_cast<Index>(rng() % (rank == 1 ? 98 : rank == 2 ? 24 : 9)));
  if (rng() % 4 == 0) c.shape[static_cast<int>(rng() % static_cast<unsigned>(rank))] = kPrimes[rng() % kPrimes.size()];
  if (volume(c.shape) > 20'000) c.shape = {c.shape[0]};

  // Uses axes in any order, each alone or joined with the next, for cuts; the others replicate.
  for (std::size_t i = 0; i < names.size(); ++i) {
    if (rng() % 4 == 0) continue;
    Split split{{names[i]}, static_cast<int>(rng() % static_cast<unsigned>(c.shape.rank()))};
    while (i + 1 < names.size() && rng() % 4 == 0) split.axes.push_back(names[++i]);
    c.placement.splits.push_back(split);
  }
  return c;
}

TEST(Owned, AgreesWithTorchChunkDoneToRealArrays) {
  std::mt19937 rng(20240601);
  int cuts = 0, empties = 0;
  const int step = every_nth(5);
  for (int i = 0; i < 6000; i += step) {
    const RandomCase c = random_case(rng);
    LocalArray full{c.shape, std::vector<Index>(static_cast<std::size_t>(volume(c.shape)))};
    std::iota(full.elements.begin(), full.elements.end(), 0);
    const auto ranks = coordinates_of_ranks(c.mesh);
    ASSERT_EQ(static_cast<Index>(ranks.size()), c.mesh.ranks());
    // Tries all ranks of a small mesh, some of a large one.
    for (std::size_t r = rng() % (1 + ranks.size() / 8); r < ranks.size(); r += 1 + ranks.size() / 8) {
      LocalArray local = full;
      for (const Split& split : c.placement.splits) {
        Index n = 1, k = 0;
        for (const std::string& axis : split.axes) {
          n *= c.mesh.size(axis);
          k = k * c.mesh.size(axis) + ranks[r].at(axis);
        }
        local = chunk_of(local, n, split.dim, k);
      }
      const auto box = owned(c.mesh, c.placement, c.shape, static_cast<Index>(r));
      ASSERT_TRUE(box.has_value());
      ASSERT_EQ(box->shape, local.shape) << c.mesh.to_string() << " " << to_string(c.shape) << " rank " << r;
      ASSERT_EQ(elements_of(*box, c.shape), local.elements) << c.mesh.to_string() << " " << to_string(c.shape);
      for (int d = 0; d < c.shape.rank(); ++d)
        if (box->shape[d] == 0) {
          ASSERT_EQ(box->origin[d], c.shape[d]);
        }
      ++cuts;
      empties += box->empty();
    }
  }
  EXPECT_GT(cuts * step, 20'000);
  EXPECT_GT(empties * step, 1000);
}

// ---- owned_boxes: interleaved sections, whose local tensors are several boxes joined

std::vector<LocalBox> boxes_of(std::string_view mesh, const std::vector<Split>& splits, const Dims& shape, Index rank) {
  return owned_boxes(mesh_of(mesh), {splits}, shape, rank);
}

TEST(OwnedBoxes, InterleavedSectionsGiveEachRankItsPartOfEveryOne) {
  // GPT-2's c_attn with a hidden size of 8 over tp=2: rank 0 holds columns 0-3, 8-11 and 16-19 (of q, k and v), rank 1
  // the others.
  const std::vector<Split> c_attn = {{{"tp"}, 1, 3}};
  EXPECT_EQ(
      boxes_of("tp=2", c_attn, {8, 24}, 0),
      (std::vector<LocalBox>{{{{0, 0}, {8, 4}}, {0, 0}}, {{{0, 8}, {8, 4}}, {0, 4}}, {{{0, 16}, {8, 4}}, {0, 8}}}));
  EXPECT_EQ(
      boxes_of("tp=2", c_attn, {8, 24}, 1),
      (std::vector<LocalBox>{{{{0, 4}, {8, 4}}, {0, 0}}, {{{0, 12}, {8, 4}}, {0, 4}}, {{{0, 20}, {8, 4}}, {0, 8}}}));
}

TEST(OwnedBoxes, ALaterSplitCutsTheLocalTensorNotEachBox) {
  // Gate and up with 8 rows each over tp=2: rank 0 holds rows 0-3 and 8-11. FSDP over 2 then gives it the first four of
  // these eight rows, not the first half of each box.
  const std::vector<Split> fc1 = {{{"tp"}, 0, 2}, {{"dp_shard"}, 0}};
  EXPECT_EQ(boxes_of("dp_shard=2,tp=2", fc1, {16}, 0), (std::vector<LocalBox>{{{{0}, {4}}, {0}}}));
  EXPECT_EQ(boxes_of("dp_shard=2,tp=2", fc1, {16}, 2), (std::vector<LocalBox>{{{{8}, {4}}, {0}}}));
  // Over 3, a piece contains parts of both sections.
  EXPECT_EQ(boxes_of("dp_shard=3,tp=2", fc1, {16}, 2), (std::vector<LocalBox>{{{{3}, {1}}, {0}}, {{{8}, {2}}, {1}}}));
}

TEST(OwnedBoxes, SectionsThatMeetAgainAreOneBox) {
  EXPECT_EQ(boxes_of("dp_shard=2", {{{"tp"}, 0, 3}}, {12, 2}, 1), (std::vector<LocalBox>{{whole({12, 2}), {0, 0}}}));
}

TEST(OwnedBoxes, ARankWithoutElementsHasEmptyBoxesAtTheEnd) {
  EXPECT_EQ(boxes_of("tp=4", {{{"tp"}, 1, 2}}, {3, 6}, 3), (std::vector<LocalBox>{{{{0, 6}, {3, 0}}, {0, 0}}}));
  EXPECT_EQ(boxes_of("dp_shard=4,tp=2", {{{"tp"}, 1, 2}, {{"dp_shard"}, 0}}, {2, 8}, 7),
            (std::vector<LocalBox>{{{{2, 2}, {0, 2}}, {0, 0}}, {{{2, 6}, {0, 2}}, {0, 2}}}));
  EXPECT_TRUE(owned_boxes(mesh_of("pp=2"), {{}, 1}, {4}, 0).empty()) << "another stage holds it";
}

// Returns the elements at these positions of one dimension, in this order.
LocalArray select(const LocalArray& t, int dim, const std::vector<Index>& positions) {
  LocalArray out{t.shape, {}};
  out.shape[dim] = static_cast<Index>(positions.size());
  Index outer = 1, inner = 1;
  for (int d = 0; d < t.shape.rank(); ++d) (d < dim ? outer : inner) *= d == dim ? 1 : t.shape[d];
  for (Index o = 0; o < outer; ++o)
    for (const Index p : positions)
      for (Index i = 0; i < inner; ++i)
        out.elements.push_back(t.elements[static_cast<std::size_t>((o * t.shape[dim] + p) * inner + i)]);
  return out;
}

// Applies one split to a local tensor, position by position.
LocalArray split_by_hand(const LocalArray& t, const Split& split, Index n, Index k) {
  const auto pieces_of = [](Index size, Index parts) { return std::max<Index>(1, (size + parts - 1) / parts); };
  const Index size = t.shape[split.dim], section = pieces_of(size, split.groups);
  std::vector<Index> positions;
  for (Index begin = 0; begin < size; begin += section) {
    const Index rows = std::min(section, size - begin), piece = pieces_of(rows, n);
    for (Index i = 0; i < rows; ++i)
      if (i / piece == k) positions.push_back(begin + i);
  }
  return select(t, split.dim, positions);
}

// Returns the local tensor that the boxes describe: the global element at each of its positions.
LocalArray local_array_of(const std::vector<LocalBox>& boxes, const Dims& shape) {
  LocalArray local{Dims::filled(shape.rank(), 0), {}};
  for (const LocalBox& b : boxes)
    for (int d = 0; d < shape.rank(); ++d) local.shape[d] = std::max(local.shape[d], b.at[d] + b.box.shape[d]);
  local.elements.assign(static_cast<std::size_t>(volume(local.shape)), -1);
  for (const LocalBox& b : boxes) {
    const std::vector<Index> from = elements_of(b.box, shape), to = elements_of({b.at, b.box.shape}, local.shape);
    for (std::size_t i = 0; i < from.size(); ++i) local.elements[static_cast<std::size_t>(to[i])] = from[i];
  }
  return local;
}

TEST(OwnedBoxes, AgreeWithSectionsCutByHandInTheirOrder) {
  std::mt19937 rng(20261121);
  int several = 0, straddling = 0;
  const int step = every_nth(5);
  for (int i = 0; i < 6000; i += step) {
    RandomCase c = random_case(rng);
    bool is_fused = false;
    for (Split& split : c.placement.splits) {
      if (rng() % 2 == 0) split.groups = static_cast<Index>(2 + rng() % 4);
      is_fused = is_fused || split.groups > 1;
    }
    LocalArray full{c.shape, std::vector<Index>(static_cast<std::size_t>(volume(c.shape)))};
    std::iota(full.elements.begin(), full.elements.end(), 0);
    const auto ranks = coordinates_of_ranks(c.mesh);
    for (std::size_t r = rng() % (1 + ranks.size() / 6); r < ranks.size(); r += 1 + ranks.size() / 6) {
      LocalArray by_hand = full;
      for (const Split& split : c.placement.splits) {
        Index n = 1, k = 0;
        for (const std::string& axis : split.axes) {
          n *= c.mesh.size(axis);
          k = k * c.mesh.size(axis) + ranks[r].at(axis);
        }
        by_hand = split_by_hand(by_hand, split, n, k);
      }
      const auto boxes = owned_boxes(c.mesh, c.placement, c.shape, static_cast<Index>(r));
      const LocalArray local = local_array_of(boxes, c.shape);
      ASSERT_EQ(local.shape, by_hand.shape) << c.mesh.to_string() << " " << to_string(c.shape) << " rank " << r;
      ASSERT_EQ(local.elements, by_hand.elements) << c.mesh.to_string() << " " << to_string(c.shape) << " rank " << r;
      several += boxes.size() > 1;
      straddling += boxes.size() > 1 && is_fused && c.placement.splits.size() > 1;
    }
  }
  EXPECT_GT(several * step, 5'000);
  EXPECT_GT(straddling * step, 2'000);
}

TEST(OwnedBoxes, FirstReplicasHoldEachElementOfAFusedTensorOnce) {
  std::mt19937 rng(8);
  for (int i = 0; i < 2000; ++i) {
    RandomCase c = random_case(rng);
    if (volume(c.shape) > 500) continue;
    for (Split& split : c.placement.splits) split.groups = static_cast<Index>(1 + rng() % 4);
    std::vector<int> holders(static_cast<std::size_t>(volume(c.shape)));
    for (Index r = 0; r < c.mesh.ranks(); ++r) {
      if (!is_first_replica(c.mesh, c.placement, r)) continue;
      for (const LocalBox& b : owned_boxes(c.mesh, c.placement, c.shape, r))
        for (const Index e : elements_of(b.box, c.shape)) ++holders[static_cast<std::size_t>(e)];
    }
    for (const int n : holders) ASSERT_EQ(n, 1) << c.mesh.to_string() << " " << to_string(c.shape);
  }
}

TEST(Owned, FirstReplicasHoldEachElementOnce) {
  std::mt19937 rng(7);
  for (int i = 0; i < 3000; ++i) {
    RandomCase c = random_case(rng);
    if (volume(c.shape) > 500) continue;
    if (rng() % 3 == 0 && c.mesh.size("pp") > 1) {  // one stage holds the tensor, so the pipeline does not cut it
      c.placement.stage = static_cast<Index>(rng() % static_cast<unsigned>(c.mesh.size("pp")));
      std::erase_if(c.placement.splits,
                    [](const Split& s) { return std::find(s.axes.begin(), s.axes.end(), "pp") != s.axes.end(); });
    }
    std::vector<int> holders(static_cast<std::size_t>(volume(c.shape)));
    for (Index r = 0; r < c.mesh.ranks(); ++r) {
      const auto box = owned(c.mesh, c.placement, c.shape, r);
      if (!box || !is_first_replica(c.mesh, c.placement, r)) continue;
      for (const Index e : elements_of(*box, c.shape)) ++holders[static_cast<std::size_t>(e)];
    }
    for (const int n : holders) ASSERT_EQ(n, 1) << c.mesh.to_string() << " " << to_string(c.shape);
  }
}

TEST(FirstReplica, IsTheLowestRankThatOwnsTheBox) {
  const Mesh mesh = mesh_of("dp_replicate=2,dp_shard=2,tp=2");
  const Placement norm{{{{"dp_shard"}, 0}}};
  std::vector<Index> first;
  for (Index r = 0; r < 8; ++r)
    if (is_first_replica(mesh, norm, r)) first.push_back(r);
  EXPECT_EQ(first, (std::vector<Index>{0, 2}));
}

}  // namespace
}  // namespace reshard::layout_test
