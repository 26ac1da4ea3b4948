#include "lib/plan/rank_plan.h"

#include <algorithm>
#include <array>
#include <deque>
#include <numeric>
#include <set>
#include <string_view>
#include <unordered_map>

#include "lib/base/parallel.h"
#include "lib/base/text.h"
#include "lib/checkpoint/fragment_index.h"
#include "lib/plan/fragment_grid.h"
#include "lib/plan/mixer.h"
#include "lib/plan/overlay.h"

namespace reshard {
namespace {

constexpr Index kEveryStage = -1;

// ---- how tensors lie on one mesh

bool is_staged(const Mesh& mesh, const Placement& placement) { return placement.stage >= 0 && mesh.size("pp") > 1; }

// Which ranks of a stage hold which parts: splits share out the dimensions, axes that are left replicate.
class Side {
 public:
  Side() = default;
  Side(const Mesh& mesh, const Placement& placement, int rank, Holders holders) {
    std::vector<std::string> left;
    for (const MeshAxis& axis : mesh.axes())
      if (axis.name != "pp" || !is_staged(mesh, placement)) left.push_back(axis.name);
    for (int d = 0; d < rank; ++d) {
      std::vector<std::string> axes;
      for (const Split& split : placement.splits)
        if (split.dim == d) axes.insert(axes.end(), split.axes.begin(), split.axes.end());
      for (const std::string& axis : axes) left.erase(std::remove(left.begin(), left.end(), axis), left.end());
      parts_.emplace_back(mesh, axes);
    }
    replicas_ = SubMesh(mesh, left);
    holders_ = holders == Holders::kFirst ? 1 : replicas_.count();
  }

  // Which part of dimension d a rank has.
  Index part(int d, Index rank) const { return parts_[static_cast<std::size_t>(d)].number(rank); }
  Index replica(Index rank) const { return replicas_.number(rank); }
  Index replica_rank(Index k) const { return replicas_.rank(k); }  // what being the k-th adds to the rank
  Index holders() const { return holders_; }                       // replicas that have what they hold: the first ones

 private:
  std::vector<SubMesh> parts_;
  SubMesh replicas_;
  Index holders_ = 1;
};

Error bad_placement(const PlacedTensor& tensor, const std::string& what) {
  return usage_error("tensor '" + printable(tensor.name) + "' " + to_string(tensor.shape) + ": " + what);
}

Status check_splits(const Mesh& mesh, const PlacedTensor& tensor) {
  std::set<std::string_view> used;
  if (is_staged(mesh, tensor.placement)) used.insert("pp");
  for (const Split& split : tensor.placement.splits) {
    if (split.dim < 0 || split.dim >= tensor.shape.rank())
      return bad_placement(tensor, "is to be cut along dimension " + std::to_string(split.dim) + ", which it has not");
    if (split.groups < 1)
      return bad_placement(tensor, "expected at least one section, got " + with_commas(split.groups));
    for (const std::string& axis : split.axes)
      if (!used.insert(axis).second) return bad_placement(tensor, "mesh axis '" + axis + "' is used twice");
  }
  return {};
}

Result<Index> stage_of(const Mesh& mesh, const PlacedTensor& tensor) {
  if (!is_staged(mesh, tensor.placement)) return kEveryStage;
  if (tensor.placement.stage < mesh.size("pp")) return tensor.placement.stage;
  return bad_placement(tensor, "expected a stage below pp = " + with_commas(mesh.size("pp")) + ", got " +
                                   with_commas(tensor.placement.stage));
}

std::vector<Split> splits_of(const Placement& placement, int dim) {
  std::vector<Split> out;
  for (const Split& split : placement.splits)
    if (split.dim == dim) out.push_back(split);
  return out;
}

// What tells splits on one mesh apart.
std::string key_of(const std::vector<Split>& splits) {
  std::string key;
  for (const Split& split : splits) {
    key += std::to_string(split.dim) + '/' + std::to_string(split.groups);
    for (const std::string& axis : split.axes) key += '.' + axis;
    key += ',';
  }
  return key + ';';
}

std::string key_of(const Mesh& mesh, const Placement& placement) {
  return key_of(placement.splits) + (is_staged(mesh, placement) ? "staged;" : ";");
}

// ---- tensors

// Tensors that both sides cut alike: those of a model's layers.
struct Kind {
  std::vector<const Overlay*> dims;
  Side from, to;
  const FragmentGrid* grid = nullptr;  // a catalog's: the source's numbers are its cells, and `from` means nothing

  int rank() const { return static_cast<int>(dims.size()); }
};

// A tensor of a catalog whose boxes form no grid.
struct Irregular {
  FragmentIndex index;
  Placement placement;  // the target's
  Dims shape;
};

struct Item {
  std::size_t tensor = 0;      // of the target's
  std::size_t source = 0;      // of the source's
  const Kind* kind = nullptr;  // one of these two
  const Irregular* irregular = nullptr;
  std::uint64_t seed = 0;   // of its moves' digests
  Index element_bytes = 1;  // of the target's dtype
  Index from_stage = kEveryStage, to_stage = kEveryStage;
};

// Numbers of items by stage, in order.
class Stages {
 public:
  void add(Index stage, std::size_t item) { items_[stage].push_back(item); }
  // Those of a stage and of every stage, in order.
  std::vector<std::size_t> of(Index stage) const {
    std::vector<std::size_t> out;
    const auto &mine = list(stage), &common = list(kEveryStage);
    std::merge(mine.begin(), mine.end(), common.begin(), common.end(), std::back_inserter(out));
    return out;
  }

 private:
  const std::vector<std::size_t>& list(Index stage) const {
    const auto found = items_.find(stage);
    return found == items_.end() ? none_ : found->second;
  }
  std::unordered_map<Index, std::vector<std::size_t>> items_;
  std::vector<std::size_t> none_;
};

// ---- moves

// What a rank has of a kind: the overlaps of its part of each dimension.
using Lists = std::vector<std::span<const Overlap>>;
// One overlap of each dimension: a box.
using Place = std::array<const Overlap*, kMaxRank>;

// Calls emit(place) for every combination, the last dimension's the fastest.
template <class Emit>
void each_place(const Lists& lists, Emit emit) {
  for (const auto& list : lists)
    if (list.empty()) return;
  Place place{};
  std::array<std::size_t, kMaxRank> at{};
  const std::size_t rank = lists.size();
  for (std::size_t d = 0; d < rank; ++d) place[d] = lists[d].data();
  for (;;) {
    emit(place);
    std::size_t d = rank;
    while (d > 0 && ++at[d - 1] == lists[d - 1].size()) {
      at[d - 1] = 0;
      place[d - 1] = lists[d - 1].data();
      --d;
    }
    if (d == 0) return;
    ++place[d - 1];
  }
}

// The place's number among those that the source's box is cut into.
Index turn_of(const Place& place, int rank) {
  Index turn = 0;
  for (int d = 0; d < rank; ++d) {
    const Overlap& o = *place[static_cast<std::size_t>(d)];
    turn = turn * o.turns + o.turn;
  }
  return turn;
}

RankMove empty_move(std::size_t tensor, int rank) {
  RankMove move;
  move.tensor = tensor;
  move.box.origin = move.box.shape = move.from_at = move.to_at = Dims::filled(rank, 0);
  return move;
}

void set_box(const Place& place, RankMove& move) {
  for (int d = 0; d < move.box.rank(); ++d) {
    const Overlap& o = *place[static_cast<std::size_t>(d)];
    move.box.origin[d] = o.begin;
    move.box.shape[d] = o.end - o.begin;
    move.from_at[d] = o.from_at;
    move.to_at[d] = o.to_at;
  }
}

Index bytes_of(const Item& item, const RankMove& move) { return volume(move.box) * item.element_bytes; }

Digest digest_of(const Item& item, const RankMove& move) {
  Mixer mix(item.seed);
  mix.add(move.from);
  mix.add(move.to);
  for (int d = 0; d < move.box.rank(); ++d) {
    mix.add(move.box.origin[d]);
    mix.add(move.box.shape[d]);
  }
  return mix.digest();
}

// One rank's share of each kind, found when the first of its tensors comes.
class Shares {
 public:
  template <class Find>
  const Lists& of(const Kind& kind, Find find) {
    const auto [found, is_new] = lists_.try_emplace(&kind);
    if (is_new)
      for (int d = 0; d < kind.rank(); ++d) found->second.push_back(find(*kind.dims[static_cast<std::size_t>(d)], d));
    return found->second;
  }

 private:
  std::unordered_map<const Kind*, Lists> lists_;
};

}  // namespace

// Everything that is known before a rank asks, and the answers. Addresses of what the deques hold are kept.
class RankPlan::Tables {
 public:
  Tables(const Mesh& source, const Mesh& target, const RankPlanOptions& how)
      : source_mesh(source),
        target_mesh(target),
        source_stages(source, {"pp"}),
        target_stages(target, {"pp"}),
        options(how) {}

  const Mesh source_mesh, target_mesh;
  const SubMesh source_stages, target_stages;
  const RankPlanOptions options;
  const Catalog* catalog = nullptr;  // null: the source is placed
  std::vector<Item> items;
  Stages giving, getting;  // items by the source's stage, and by the target's
  std::deque<Overlay> overlays;
  std::deque<Kind> kinds;
  std::deque<FragmentGrid> grids;
  std::deque<Irregular> irregular;

  // The source's ranks, or the catalog's files.
  std::size_t givers() const { return catalog ? catalog->files.size() : static_cast<std::size_t>(source_mesh.ranks()); }
  std::size_t giver(const Item& item, const RankMove& move) const {
    const auto from = static_cast<std::size_t>(move.from);
    return catalog ? catalog->tensors()[item.source].fragments.extent(from).file : from;
  }

  // Calls visit(item, move).
  template <class Visitor>
  void each_into(Index rank, Visitor visit) const {
    Shares shares;
    for (const std::size_t i : getting.of(target_stages.number(rank))) {
      const Item& item = items[i];
      if (item.irregular) {
        each_into_irregular(item, rank, visit);
        continue;
      }
      const Kind& kind = *item.kind;
      const Index replica = kind.to.replica(rank);
      if (replica >= kind.to.holders()) continue;
      const Lists& mine =
          shares.of(kind, [&](const Overlay& overlay, int d) { return overlay.into(kind.to.part(d, rank)); });
      RankMove move = empty_move(item.tensor, kind.rank());
      move.to = rank;
      const Index stage = item.from_stage == kEveryStage ? 0 : source_stages.rank(item.from_stage);
      each_place(mine, [&](const Place& place) {
        set_box(place, move);
        move.from = stage;
        for (std::size_t d = 0; d < mine.size(); ++d) move.from += place[d]->from_add;
        if (kind.grid) move.from = kind.grid->fragment[static_cast<std::size_t>(move.from)];
        if (kind.from.holders() > 1) {
          const Index turn = first_turn(item, place) + replica;
          move.from += kind.from.replica_rank(turn % kind.from.holders());
        }
        visit(item, move);
      });
    }
  }

  template <class Visitor>
  void each_out_of(Index rank, Visitor visit) const {
    Shares shares;
    for (const std::size_t i : giving.of(source_stages.number(rank))) {
      const Item& item = items[i];
      const Kind& kind = *item.kind;
      const Index holders = kind.from.holders(), replica = kind.from.replica(rank);
      if (replica >= holders) continue;
      const Lists& mine =
          shares.of(kind, [&](const Overlay& overlay, int d) { return overlay.out_of(kind.from.part(d, rank)); });
      RankMove move = empty_move(item.tensor, kind.rank());
      move.from = rank;
      const Index stage = item.to_stage == kEveryStage ? 0 : target_stages.rank(item.to_stage);
      each_place(mine, [&](const Place& place) {
        set_box(place, move);
        Index first = stage;
        for (std::size_t d = 0; d < mine.size(); ++d) first += place[d]->to_add;
        // The target's replicas whose turn falls on us.
        const Index before = first_turn(item, place) % holders;
        for (Index taker = (replica + holders - before) % holders; taker < kind.to.holders(); taker += holders) {
          move.to = first + kind.to.replica_rank(taker);
          visit(item, move);
        }
      });
    }
  }

 private:
  // The replicas of a source's box take turns: at its pieces, and at each at the target's replicas that want it.
  // Tensors begin with different ones, so that what is left over does not always fall on the first.
  static Index first_turn(const Item& item, const Place& place) {
    const Kind& kind = *item.kind;
    return turn_of(place, kind.rank()) * kind.to.holders() + static_cast<Index>(item.tensor);
  }

  template <class Visitor>
  void each_into_irregular(const Item& item, Index rank, Visitor visit) const {
    const Irregular& tensor = *item.irregular;
    if (options.target == Holders::kFirst && !is_first_replica(target_mesh, tensor.placement, rank)) return;
    const FragmentList& fragments = catalog->tensors()[item.source].fragments;
    RankMove move = empty_move(item.tensor, tensor.shape.rank());
    move.to = rank;
    for (const LocalBox& piece : owned_boxes(target_mesh, tensor.placement, tensor.shape, rank))
      tensor.index.overlapping(piece.box, [&](std::size_t fragment, const Box& both) {
        const Box giver = fragments.box(fragment);
        move.from = static_cast<Index>(fragment);
        move.box = both;
        for (int d = 0; d < both.rank(); ++d) {
          move.from_at[d] = both.begin(d) - giver.begin(d);
          move.to_at[d] = piece.at[d] + both.begin(d) - piece.box.begin(d);
        }
        visit(item, move);
      });
  }
};

// Finds the kinds of tensors there are. Both sides' cuts of a dimension are overlaid once for all tensors that have it.
class RankPlan::Builder {
 public:
  explicit Builder(Tables& tables) : t_(tables) {}

  Status add(const PlacedTensor& from, std::size_t source, const PlacedTensor& to, std::size_t tensor) {
    const Index from_stage = TRY(stage_of(t_.source_mesh, from)), to_stage = TRY(stage_of(t_.target_mesh, to));
    if (is_passed_over(from_stage, to_stage, to)) return {};
    Item& item = add_item(source, to, tensor, from_stage, to_stage);
    item.kind = TRY(kind_of(from, to));
    return {};
  }

  Status add_recorded(std::size_t source, const PlacedTensor& to, std::size_t tensor) {
    const Index to_stage = TRY(stage_of(t_.target_mesh, to));
    if (is_passed_over(kEveryStage, to_stage, to)) return {};
    Item& item = add_item(source, to, tensor, kEveryStage, to_stage);
    const FragmentList& fragments = t_.catalog->tensors()[source].fragments;
    if (const FragmentGrid* grid = grid_of(fragments, to.shape)) {
      item.kind = TRY(kind_of(*grid, to));
    } else {
      TRY(check_splits(t_.target_mesh, to));
      item.irregular = &t_.irregular.emplace_back(Irregular{FragmentIndex(fragments), to.placement, to.shape});
    }
    return {};
  }

 private:
  bool is_passed_over(Index from_stage, Index to_stage, const PlacedTensor& to) const {
    if (volume(to.shape) == 0) return true;
    if (!t_.options.only) return false;
    const Index rank = *t_.options.only;
    const auto has = [&](const Mesh& mesh, const SubMesh& stages, Index stage) {
      return rank < mesh.ranks() && (stage == kEveryStage || stage == stages.number(rank));
    };
    return !has(t_.target_mesh, t_.target_stages, to_stage) &&
           (t_.catalog || !has(t_.source_mesh, t_.source_stages, from_stage));
  }

  // Without what holds it.
  Item& add_item(std::size_t source, const PlacedTensor& to, std::size_t tensor, Index from_stage, Index to_stage) {
    Mixer seed;
    seed.add(to.name);
    seed.add(static_cast<Index>(to.dtype));
    seed.add(to.shape);
    t_.giving.add(from_stage, t_.items.size());
    t_.getting.add(to_stage, t_.items.size());
    Item& item = t_.items.emplace_back();
    item.tensor = tensor;
    item.source = source;
    item.seed = seed.value();
    item.element_bytes = byte_size(to.dtype);
    item.from_stage = from_stage;
    item.to_stage = to_stage;
    return item;
  }

  Result<const Kind*> kind_of(const PlacedTensor& from, const PlacedTensor& to) {
    const Kind*& known =
        kinds_[to_string(to.shape) + key_of(t_.source_mesh, from.placement) + key_of(t_.target_mesh, to.placement)];
    if (known) return known;
    TRY(check_splits(t_.source_mesh, from));
    TRY(check_splits(t_.target_mesh, to));
    const int rank = to.shape.rank();
    Kind kind{{}, Side(t_.source_mesh, from.placement, rank, t_.options.source), side_of(to)};
    for (int d = 0; d < rank; ++d) {
      const std::vector<Split> mine = splits_of(from.placement, d), theirs = splits_of(to.placement, d);
      const Overlay*& overlay = overlays_[std::to_string(to.shape[d]) + ":" + key_of(mine) + key_of(theirs)];
      if (!overlay) overlay = TRY(overlay_of(cuts_of(t_.source_mesh, mine, to.shape[d]), to, d));
      kind.dims.push_back(overlay);
    }
    return known = &t_.kinds.emplace_back(std::move(kind));
  }

  Result<const Kind*> kind_of(const FragmentGrid& grid, const PlacedTensor& to) {
    const Kind*& known = kinds_of_grids_[&grid][key_of(t_.target_mesh, to.placement)];
    if (known) return known;
    TRY(check_splits(t_.target_mesh, to));
    Kind kind{{}, {}, side_of(to), &grid};
    for (int d = 0; d < to.shape.rank(); ++d)
      kind.dims.push_back(TRY(overlay_of(grid.dims[static_cast<std::size_t>(d)], to, d)));
    return known = &t_.kinds.emplace_back(std::move(kind));
  }

  Side side_of(const PlacedTensor& to) const {
    return {t_.target_mesh, to.placement, to.shape.rank(), t_.options.target};
  }

  Result<const Overlay*> overlay_of(const std::vector<Cut>& source, const PlacedTensor& to, int d) {
    const std::vector<Cut> target = cuts_of(t_.target_mesh, splits_of(to.placement, d), to.shape[d]);
    return &t_.overlays.emplace_back(TRY(Overlay::make(source, target)));
  }

  // Null where the boxes form none.
  const FragmentGrid* grid_of(const FragmentList& fragments, const Dims& shape) {
    auto& alike = grids_[fragments.hash_of_boxes()];
    for (const auto& [boxes, grid] : alike)
      if (boxes->has_boxes_of(fragments)) return grid;
    auto found = FragmentGrid::find(fragments, shape);
    alike.emplace_back(&fragments, found ? &t_.grids.emplace_back(*std::move(found)) : nullptr);
    return alike.back().second;
  }

  Tables& t_;
  std::unordered_map<std::string, const Kind*> kinds_;
  std::unordered_map<std::string, const Overlay*> overlays_;
  std::unordered_map<const FragmentGrid*, std::unordered_map<std::string, const Kind*>> kinds_of_grids_;
  std::unordered_map<std::uint64_t, std::vector<std::pair<const FragmentList*, const FragmentGrid*>>> grids_;
};

double imbalance(std::span<const Index> bytes) {
  double sum = 0, most = 0, loaded = 0;
  for (const Index n : bytes) {
    sum += static_cast<double>(n);
    most = std::max(most, static_cast<double>(n));
    loaded += n > 0 ? 1 : 0;
  }
  return sum > 0 ? most * loaded / sum - 1 : 0;
}

namespace {

// Finds tensors by name.
class NameIndex {
 public:
  explicit NameIndex(const PlacedModel& model) : model_(model) {}

  // `likely` is looked at first: both sides mostly have the same tensors in the same order.
  std::optional<std::size_t> find(std::string_view name, std::size_t likely) {
    if (likely < model_.tensors.size() && model_.tensors[likely].name == name) return likely;
    if (by_name_.empty())
      for (std::size_t i = 0; i < model_.tensors.size(); ++i) by_name_.emplace(model_.tensors[i].name, i);
    const auto found = by_name_.find(name);
    if (found == by_name_.end()) return std::nullopt;
    return found->second;
  }

 private:
  const PlacedModel& model_;
  std::unordered_map<std::string_view, std::size_t> by_name_;  // filled when it is needed
};

// That a target's tensor has a source of its shape. `given` is the source's, null: there is none.
Status check_source(const PlacedTensor& wanted, const Dims* given) {
  if (!given) return usage_error("plan: no source for tensor '" + printable(wanted.name) + "'");
  if (*given == wanted.shape) return {};
  return usage_error("tensor '" + printable(wanted.name) + "': expected shape " + to_string(wanted.shape) + ", got " +
                     to_string(*given));
}

}  // namespace

RankPlan::RankPlan(std::unique_ptr<Tables> tables) : tables_(std::move(tables)) {}
RankPlan::RankPlan(RankPlan&&) noexcept = default;
RankPlan& RankPlan::operator=(RankPlan&&) noexcept = default;
RankPlan::~RankPlan() = default;

Result<RankPlan> RankPlan::make(const PlacedModel& source, const PlacedModel& target, const RankPlanOptions& options) {
  auto tables = std::make_unique<Tables>(source.mesh, target.mesh, options);
  Builder builder(*tables);
  NameIndex names(source);
  for (std::size_t i = 0; i < target.tensors.size(); ++i) {
    const PlacedTensor& wanted = target.tensors[i];
    const auto found = names.find(wanted.name, i);
    TRY(check_source(wanted, found ? &source.tensors[*found].shape : nullptr));
    TRY(builder.add(source.tensors[*found], *found, wanted, i));
  }
  return RankPlan(std::move(tables));
}

Result<RankPlan> RankPlan::make(const Catalog& source, const PlacedModel& target, const RankPlanOptions& options) {
  auto tables = std::make_unique<Tables>(Mesh(), target.mesh, options);
  tables->catalog = &source;
  Builder builder(*tables);
  for (std::size_t i = 0; i < target.tensors.size(); ++i) {
    const PlacedTensor& wanted = target.tensors[i];
    const auto found = source.find(wanted.name);
    TRY(check_source(wanted, found ? &source.tensors()[*found].shape : nullptr));
    TRY(builder.add_recorded(*found, wanted, i));
  }
  return RankPlan(std::move(tables));
}

void RankPlan::visit_into(Index rank, const Visit& visit) const {
  tables_->each_into(rank, [&](const Item&, const RankMove& move) { visit(move); });
}

void RankPlan::visit_out_of(Index rank, const Visit& visit) const {
  tables_->each_out_of(rank, [&](const Item&, const RankMove& move) { visit(move); });
}

namespace {

// `each` calls its argument with every item and move: once to count them, as moves are large, once to keep them.
template <class Each>
RankPart collect(Each each) {
  RankPart part;
  std::size_t moves = 0;
  each([&](const Item&, const RankMove&) { ++moves; });
  part.moves.reserve(moves);
  each([&](const Item& item, const RankMove& move) {
    part.moves.push_back(move);
    part.bytes += bytes_of(item, move);
    part.digest += digest_of(item, move);
  });
  return part;
}

}  // namespace

RankPart RankPlan::into(Index rank) const {
  return collect([&](auto visit) { tables_->each_into(rank, visit); });
}

RankPart RankPlan::out_of(Index rank) const {
  return collect([&](auto visit) { tables_->each_out_of(rank, visit); });
}

RankPlanFigures RankPlan::all(int threads) const {
  const Tables& t = *tables_;
  const auto workers = static_cast<std::size_t>(std::max(1, threads));
  std::vector<RankPlanFigures> counts(workers);
  for (RankPlanFigures& c : counts) c.out_of.resize(t.givers());
  RankPlanFigures total;
  total.into.resize(static_cast<std::size_t>(t.target_mesh.ranks()));
  total.out_of.resize(t.givers());
  const auto count = [&](int thread, Index rank) -> Status {
    RankPlanFigures& c = counts[static_cast<std::size_t>(thread)];
    Index moves = 0, bytes = 0;
    Digest digest;
    t.each_into(rank, [&](const Item& item, const RankMove& move) {
      const Index n = bytes_of(item, move);
      c.out_of[t.giver(item, move)] += n;
      digest += digest_of(item, move);
      bytes += n;
      ++moves;
    });
    c.moves += moves;
    c.bytes += bytes;
    c.digest += digest;
    total.into[static_cast<std::size_t>(rank)] = bytes;
    return {};
  };
  parallel_for(t.target_mesh.ranks(), static_cast<int>(workers), count).value();
  for (const RankPlanFigures& c : counts) {
    total.moves += c.moves;
    total.bytes += c.bytes;
    total.digest += c.digest;
    std::transform(c.out_of.begin(), c.out_of.end(), total.out_of.begin(), total.out_of.begin(), std::plus<>());
  }
  return total;
}

}  // namespace reshard
