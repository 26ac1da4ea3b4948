#include "lib/plan/rank_plan.h"

#include <gtest/gtest.h>

#include <map>
#include <set>

#include "lib/plan/plan.h"
#include "tests/support/layouts.h"

namespace reshard {
namespace {

// Small enough for arrays of its elements.
Dims small_shape(Rng& rng) {
  Dims shape;
  do {
    shape = random_shape(rng);
  } while (volume(shape) > 1000);
  return shape;
}

// Like random_placement, but some first cuts of a dimension are in sections.
Placement random_cuts(Rng& rng, const Mesh& mesh, const Dims& shape) {
  Placement p = random_placement(rng, mesh, shape);
  std::set<int> cut;
  for (Split& split : p.splits)
    if (cut.insert(split.dim).second && below(rng, 4) == 0) split.groups = 2 + below(rng, 2);
  return p;
}

PlacedModel random_model(Rng& rng, const std::vector<Dims>& shapes) {
  PlacedModel model{random_mesh(rng), {}};
  for (std::size_t i = 0; i < shapes.size(); ++i)
    model.tensors.push_back({"w" + std::to_string(i), i % 2 == 0 ? DType::kFloat32 : DType::kBFloat16, shapes[i],
                             random_cuts(rng, model.mesh, shapes[i])});
  return model;
}

std::vector<Dims> random_shapes(Rng& rng) {
  std::vector<Dims> shapes;
  for (int i = 0; i < 3; ++i) shapes.push_back(small_shape(rng));
  shapes.push_back(shapes[0]);  // a tensor of the same shape, perhaps of the same kind
  return shapes;
}

Index element_number(const Dims& shape, const Dims& at) {
  Index n = 0;
  for (int d = 0; d < shape.rank(); ++d) n = n * shape[d] + at[d];
  return n;
}

// Calls visit(coordinates in the box, from its origin) for each element.
template <class Visit>
void each_element(const Dims& shape, Visit visit) {
  for (Index n = 0; n < volume(shape); ++n) {
    Dims at = Dims::filled(shape.rank(), 0);
    Index rest = n;
    for (int d = shape.rank() - 1; d >= 0; --d) {
      at[d] = rest % shape[d];
      rest /= shape[d];
    }
    visit(at);
  }
}

Dims plus(const Dims& a, const Dims& b) {
  Dims out = a;
  for (int d = 0; d < a.rank(); ++d) out[d] += b[d];
  return out;
}

// What a rank holds of a tensor, element by element: the number in the whole tensor at each place of the local one.
using Local = std::map<Dims, Index>;
Local local_tensor(const PlacedModel& model, std::size_t tensor, Index rank) {
  const PlacedTensor& t = model.tensors[tensor];
  Local out;
  for (const LocalBox& piece : owned_boxes(model.mesh, t.placement, t.shape, rank))
    each_element(piece.box.shape, [&](const Dims& at) {
      out[plus(piece.at, at)] = element_number(t.shape, plus(piece.box.origin, at));
    });
  return out;
}

using Locals = std::vector<std::vector<Local>>;  // by rank, then tensor
Locals all_locals(const PlacedModel& model) {
  Locals out;
  for (Index rank = 0; rank < model.mesh.ranks(); ++rank) {
    out.emplace_back();
    for (std::size_t i = 0; i < model.tensors.size(); ++i) out.back().push_back(local_tensor(model, i, rank));
  }
  return out;
}

// Makes every rank's local tensors of the target by carrying out moves, as ranks would, and compares them.
void expect_moves_make_the_target(const PlacedModel& source, const PlacedModel& target, const RankPlan& plan,
                                  Holders giving, Holders getting) {
  const Locals given = all_locals(source), wanted = all_locals(target);
  for (Index rank = 0; rank < target.mesh.ranks(); ++rank) {
    const auto r = static_cast<std::size_t>(rank);
    std::vector<Local> made(target.tensors.size());
    plan.visit_into(rank, [&](const RankMove& move) {
      ASSERT_EQ(move.to, rank);
      ASSERT_FALSE(move.box.empty());
      if (giving == Holders::kFirst) {
        ASSERT_TRUE(is_first_replica(source.mesh, source.tensors[move.tensor].placement, move.from));
      }
      const Local& from = given[static_cast<std::size_t>(move.from)][move.tensor];
      each_element(move.box.shape, [&](const Dims& at) {
        const auto element = from.find(plus(move.from_at, at));
        ASSERT_NE(element, from.end()) << "rank " << move.from << " has nothing there";
        ASSERT_EQ(element->second, element_number(target.tensors[move.tensor].shape, plus(move.box.origin, at)));
        ASSERT_TRUE(made[move.tensor].emplace(plus(move.to_at, at), element->second).second) << "twice";
      });
    });
    for (std::size_t i = 0; i < target.tensors.size(); ++i) {
      const bool has = getting == Holders::kAll || is_first_replica(target.mesh, target.tensors[i].placement, rank);
      ASSERT_EQ(made[i], has ? wanted[r][i] : Local()) << "rank " << rank << ", tensor " << i;
    }
  }
}

struct Case {
  PlacedModel source, target;
};
Case random_case(Rng& rng) {
  const std::vector<Dims> shapes = random_shapes(rng);
  return {random_model(rng, shapes), random_model(rng, shapes)};
}

TEST(RankPlan, FillsEveryRanksLocalTensorsExactly) {
  Rng rng(41);
  for (int n = 0; n < 120; ++n) {
    const Case c = random_case(rng);
    const RankPlanOptions options{n % 2 == 0 ? Holders::kFirst : Holders::kAll,
                                  n % 4 < 2 ? Holders::kFirst : Holders::kAll, std::nullopt};
    const auto plan = RankPlan::make(c.source, c.target, options);
    ASSERT_TRUE(plan) << plan.error().message();
    ASSERT_NO_FATAL_FAILURE(expect_moves_make_the_target(c.source, c.target, *plan, options.source, options.target))
        << "case " << n;
  }
}

std::string to_string(const RankMove& m) {
  return std::to_string(m.tensor) + ": " + std::to_string(m.from) + "->" + std::to_string(m.to) + " " +
         reshard::to_string(m.box) + " " + reshard::to_string(m.from_at) + " " + reshard::to_string(m.to_at);
}

// The moves between each two ranks, in the order in which one side sees them.
using Traffic = std::map<std::pair<Index, Index>, std::vector<std::string>>;

TEST(RankPlan, BothSidesSeeTheSameMovesInTheSameOrder) {
  Rng rng(42);
  for (int n = 0; n < 200; ++n) {
    const Case c = random_case(rng);
    const RankPlanOptions options{n % 2 == 0 ? Holders::kFirst : Holders::kAll,
                                  n % 4 < 2 ? Holders::kFirst : Holders::kAll, std::nullopt};
    const auto plan = RankPlan::make(c.source, c.target, options);
    ASSERT_TRUE(plan) << plan.error().message();
    Traffic got, given;
    Digest into, out_of;
    for (Index rank = 0; rank < c.target.mesh.ranks(); ++rank) {
      const RankPart part = plan->into(rank);
      into += part.digest;
      for (const RankMove& move : part.moves) got[{move.from, move.to}].push_back(to_string(move));
    }
    for (Index rank = 0; rank < c.source.mesh.ranks(); ++rank) {
      const RankPart part = plan->out_of(rank);
      out_of += part.digest;
      for (const RankMove& move : part.moves) {
        ASSERT_EQ(move.from, rank);
        given[{move.from, move.to}].push_back(to_string(move));
      }
    }
    ASSERT_EQ(got, given) << "case " << n;
    ASSERT_EQ(into, out_of);
  }
}

// A checkpoint as the ranks of a placed model write it: one file a rank.
Catalog stored(const PlacedModel& model, bool with_replicas = false) {
  Catalog out;
  out.files.resize(static_cast<std::size_t>(model.mesh.ranks()));
  for (const PlacedTensor& placed : model.tensors) {
    Tensor t;
    t.name = placed.name;
    t.dtype = placed.dtype;
    t.shape = placed.shape;
    t.fragments = t.replicas = FragmentList(placed.shape.rank());
    for (Index rank = 0; rank < model.mesh.ranks(); ++rank)
      for (const LocalBox& piece : owned_boxes(model.mesh, placed.placement, placed.shape, rank)) {
        const bool first = is_first_replica(model.mesh, placed.placement, rank);
        if (!first && !with_replicas) continue;
        (first ? t.fragments : t.replicas).add(piece.box, {static_cast<std::uint32_t>(rank), 0, 0});
      }
    EXPECT_TRUE(out.add(std::move(t)));
  }
  return out;
}

TEST(RankPlan, HasTheMovesOfMakePlan) {
  Rng rng(43);
  for (int n = 0; n < 300; ++n) {
    const Case c = random_case(rng);
    const bool all = n % 2 == 0;
    const auto whole = make_plan(stored(c.source), stored(c.target, all));
    ASSERT_TRUE(whole) << whole.error().message();
    const RankPlanOptions options{Holders::kFirst, all ? Holders::kAll : Holders::kFirst, std::nullopt};
    const auto plan = RankPlan::make(c.source, c.target, options);
    ASSERT_TRUE(plan) << plan.error().message();
    const RankPlanFigures figures = plan->all(2);
    ASSERT_EQ(figures.moves, whole->moves) << "case " << n;
    ASSERT_EQ(figures.bytes, whole->bytes_written);
  }
}

TEST(RankPlan, OfARecordedSourceIsThatOfItsDescription) {
  Rng rng(44);
  for (int n = 0; n < 200; ++n) {
    const Case c = random_case(rng);
    const Catalog catalog = stored(c.source);
    const auto described = RankPlan::make(c.source, c.target, {});
    const auto recorded = RankPlan::make(catalog, c.target, {});
    ASSERT_TRUE(recorded) << recorded.error().message();
    for (Index rank = 0; rank < c.target.mesh.ranks(); ++rank) {
      const RankPart a = described->into(rank), b = recorded->into(rank);
      ASSERT_EQ(a.moves.size(), b.moves.size()) << "case " << n;
      ASSERT_EQ(a.bytes, b.bytes);
      for (std::size_t i = 0; i < a.moves.size(); ++i) {
        const FragmentList& fragments = catalog.tensors()[b.moves[i].tensor].fragments;
        const auto fragment = static_cast<std::size_t>(b.moves[i].from);
        ASSERT_EQ(a.moves[i].box, b.moves[i].box);
        ASSERT_EQ(a.moves[i].to_at, b.moves[i].to_at);
        ASSERT_EQ(a.moves[i].from, fragments.extent(fragment).file);
        ASSERT_EQ(plus(fragments.box(fragment).origin, b.moves[i].from_at), b.moves[i].box.origin);
      }
    }
    ASSERT_EQ(described->all(1).out_of, recorded->all(2).out_of);
  }
}

// Cuts a box in two again and again: no grid.
void cut_up(Rng& rng, const Box& box, int depth, std::vector<Box>& out) {
  const int d = box.rank() == 0 ? 0 : static_cast<int>(below(rng, box.rank()));
  if (depth == 0 || box.rank() == 0 || box.shape[d] < 2) {
    out.push_back(box);
    return;
  }
  Box first = box, second = box;
  first.shape[d] = 1 + below(rng, box.shape[d] - 1);
  second.origin[d] += first.shape[d];
  second.shape[d] -= first.shape[d];
  cut_up(rng, first, depth - 1, out);
  cut_up(rng, second, depth - 1, out);
}

TEST(RankPlan, FindsTheFragmentsOfBoxesThatFormNoGrid) {
  Rng rng(45);
  for (int n = 0; n < 200; ++n) {
    const Dims shape = small_shape(rng);
    std::vector<Box> boxes;
    cut_up(rng, whole(shape), 4, boxes);
    Tensor t;
    t.name = "w";
    t.dtype = DType::kBFloat16;
    t.shape = shape;
    t.fragments = t.replicas = FragmentList(shape.rank());
    for (const Box& box : boxes) t.fragments.add(box, {0, 0, 0});
    Catalog catalog;
    catalog.files.resize(1);
    ASSERT_TRUE(catalog.add(t));
    PlacedModel target{random_mesh(rng), {}};
    target.tensors.push_back({"w", DType::kBFloat16, shape, random_cuts(rng, target.mesh, shape)});
    const auto plan = RankPlan::make(catalog, target, {});
    ASSERT_TRUE(plan) << plan.error().message();
    for (Index rank = 0; rank < target.mesh.ranks(); ++rank) {
      Local made;
      plan->visit_into(rank, [&](const RankMove& move) {
        const Box fragment = boxes[static_cast<std::size_t>(move.from)];
        ASSERT_TRUE(contains(fragment, move.box));
        ASSERT_EQ(plus(fragment.origin, move.from_at), move.box.origin);
        each_element(move.box.shape, [&](const Dims& at) {
          ASSERT_TRUE(made.emplace(plus(move.to_at, at), element_number(shape, plus(move.box.origin, at))).second);
        });
      });
      ASSERT_EQ(made, local_tensor(target, 0, rank)) << "case " << n;
    }
    const auto reference = make_plan(catalog, stored(target, true));
    ASSERT_EQ(plan->all(1).moves, reference->moves);
  }
}

TEST(RankPlan, OfOneRankIsItsPartOfTheWhole) {
  Rng rng(46);
  for (int n = 0; n < 100; ++n) {
    const Case c = random_case(rng);
    const RankPlanOptions all{Holders::kAll, Holders::kAll, std::nullopt};
    const auto whole = RankPlan::make(c.source, c.target, all);
    for (Index rank = 0; rank < std::max(c.source.mesh.ranks(), c.target.mesh.ranks()); ++rank) {
      RankPlanOptions mine = all;
      mine.only = rank;
      const auto plan = RankPlan::make(c.source, c.target, mine);
      ASSERT_TRUE(plan) << plan.error().message();
      if (rank < c.target.mesh.ranks()) {
        ASSERT_EQ(plan->into(rank).digest, whole->into(rank).digest);
      }
      if (rank < c.source.mesh.ranks()) {
        ASSERT_EQ(plan->out_of(rank).digest, whole->out_of(rank).digest);
      }
    }
  }
}

TEST(RankPlan, DealsPiecesOutToReplicasInTurn) {
  // Eight replicas of each half; 64 ranks want an eighth of the tensor each, and eight of them the same one.
  const auto mesh = [](const char* text) { return *Mesh::parse(text); };
  const Placement half{{{{"tp"}, 0}}, -1}, eighth{{{{"tp"}, 0}}, -1};
  const PlacedModel source{mesh("dp_replicate=8,tp=2"), {{"w", DType::kBFloat16, {64, 16}, half}}};
  const PlacedModel target{mesh("dp_replicate=8,tp=8"), {{"w", DType::kBFloat16, {64, 16}, eighth}}};
  const auto even = RankPlan::make(source, target, {Holders::kAll, Holders::kAll, std::nullopt});
  const RankPlanFigures figures = even->all(2);
  EXPECT_EQ(figures.moves, 64);
  for (const Index n : figures.out_of) EXPECT_EQ(n, 64 * 16 * 2 * 8 / 16);
  EXPECT_EQ(imbalance(figures.out_of), 0);
  EXPECT_EQ(imbalance(figures.into), 0);
  const auto first = RankPlan::make(source, target, {Holders::kFirst, Holders::kAll, std::nullopt})->all(1);
  EXPECT_EQ(first.out_of[0] + first.out_of[1], figures.bytes);
}

TEST(RankPlan, SharesOutTensorsThatEveryRankHas) {
  PlacedModel source{*Mesh::parse("dp_shard=4"), {}}, target{*Mesh::parse("tp=6"), {}};
  for (int i = 0; i < 8; ++i)
    for (PlacedModel* model : {&source, &target})
      model->tensors.push_back({"step" + std::to_string(i), DType::kFloat32, {}, {}});
  const auto plan = RankPlan::make(source, target, {Holders::kAll, Holders::kAll, std::nullopt});
  const RankPlanFigures figures = plan->all(2);
  EXPECT_EQ(figures.moves, 48);
  EXPECT_EQ(figures.out_of, (std::vector<Index>{48, 48, 48, 48}));
}

TEST(RankPlan, FindsTensorsByName) {
  Rng rng(47);
  Case c = random_case(rng);
  const Digest digest = RankPlan::make(c.source, c.target, {})->all(1).digest;
  std::reverse(c.source.tensors.begin(), c.source.tensors.end());
  const auto plan = RankPlan::make(c.source, c.target, {});
  ASSERT_TRUE(plan) << plan.error().message();
  EXPECT_EQ(plan->all(1).digest, digest);
}

TEST(RankPlan, DigestsTellDifferentPlansApart) {
  const std::vector<Dims> shapes = {{64, 32}, {97}, {16, 4, 6}};
  std::set<std::string> seen, told;
  for (const char* mesh : {"tp=2", "tp=4", "dp_shard=2", "dp_shard=4,tp=2", "dp_shard=2,tp=4", "pp=2,tp=2"}) {
    PlacedModel source{*Mesh::parse("dp_shard=3"), {}}, target{*Mesh::parse(mesh), {}};
    for (std::size_t i = 0; i < shapes.size(); ++i) {
      source.tensors.push_back({"w" + std::to_string(i), DType::kFloat32, shapes[i], {{{{"dp_shard"}, 0}}, -1}});
      target.tensors.push_back(
          {"w" + std::to_string(i), DType::kFloat32, shapes[i], {{{{"tp"}, 0}, {{"dp_shard"}, 0}}, -1}});
    }
    told.insert(digest_of(target).hex());
    seen.insert(RankPlan::make(source, target, {})->all(1).digest.hex());
    target.tensors[1].name = "x";
    source.tensors[1].name = "x";
    told.insert(digest_of(target).hex());
    seen.insert(RankPlan::make(source, target, {})->all(1).digest.hex());
    target.tensors[2].placement.splits[0].dim = 1;
    told.insert(digest_of(target).hex());
    if (target.mesh.size("tp") > 1) seen.insert(RankPlan::make(source, target, {})->all(2).digest.hex());
  }
  EXPECT_EQ(told.size(), 18u);
  EXPECT_EQ(seen.size(), 15u) << "tp=2 and dp_shard=2 put the same boxes on the same ranks, but for dimension 1";
}

TEST(RankPlan, RefusesWhatMakesNoSense) {
  const PlacedModel source{*Mesh::parse("dp_shard=2"), {{"w", DType::kFloat32, {8, 4}, {}}}};
  const auto message = [&](PlacedTensor wanted, const char* mesh) {
    const PlacedModel target{*Mesh::parse(mesh), {std::move(wanted)}};
    const auto plan = RankPlan::make(source, target, {});
    Catalog catalog = stored(source);
    const auto recorded = RankPlan::make(catalog, target, {});
    EXPECT_FALSE(recorded);
    if (!recorded && !plan) {
      EXPECT_EQ(recorded.error().message(), plan.error().message());
    }
    return plan ? "fine" : plan.error().message();
  };
  EXPECT_EQ(message({"v", DType::kFloat32, {8, 4}, {}}, "tp=2"), "plan: no source for tensor 'v'");
  EXPECT_EQ(message({"w", DType::kFloat32, {4, 8}, {}}, "tp=2"), "tensor 'w': expected shape [4, 8], got [8, 4]");
  EXPECT_EQ(message({"w", DType::kFloat32, {8, 4}, {{{{"tp"}, 2}}, -1}}, "tp=2"),
            "tensor 'w' [8, 4]: is to be cut along dimension 2, which it has not");
  EXPECT_EQ(message({"w", DType::kFloat32, {8, 4}, {{{{"tp"}, 0}, {{"tp"}, 1}}, -1}}, "tp=2"),
            "tensor 'w' [8, 4]: mesh axis 'tp' is used twice");
  EXPECT_EQ(message({"w", DType::kFloat32, {8, 4}, {{{{"pp"}, 0}}, 1}}, "pp=2"),
            "tensor 'w' [8, 4]: mesh axis 'pp' is used twice");
  EXPECT_EQ(message({"w", DType::kFloat32, {8, 4}, {{}, 5}}, "pp=2"),
            "tensor 'w' [8, 4]: expected a stage below pp = 2, got 5");
  EXPECT_EQ(message({"w", DType::kFloat32, {8, 4}, {{{{"tp"}, 0, 0}}, -1}}, "tp=2"),
            "tensor 'w' [8, 4]: expected at least one section, got 0");
}

TEST(Imbalance, IsTheMostLoadedOverTheMean) {
  EXPECT_DOUBLE_EQ(imbalance(std::vector<Index>{10, 10, 10}), 0);
  EXPECT_DOUBLE_EQ(imbalance(std::vector<Index>{15, 5, 10, 0}), 0.5) << "who has nothing does not count";
  EXPECT_DOUBLE_EQ(imbalance(std::vector<Index>{}), 0);
  EXPECT_DOUBLE_EQ(imbalance(std::vector<Index>{0, 0}), 0);
}

}  // namespace
}  // namespace reshard
