#include "lib/plan/rank_plan.h"

#include <algorithm>
#include <array>
#include <numeric>
#include <set>
#include <string_view>
#include <unordered_map>

#include "lib/base/parallel.h"
#include "lib/base/text.h"
#include "lib/checkpoint/fragment_index.h"
#include "lib/plan/fragment_grid.h"
#include "lib/plan/overlay.h"

namespace reshard {
namespace {

// Two sums of a running state, the numbers of which are added one by one.
class Mixer {
 public:
  explicit Mixer(std::uint64_t seed = 0) : state_(digest_mix(seed + kStep)) {}
  void add(Index n) {
    state_ = (state_ ^ static_cast<std::uint64_t>(n)) * 0xff51afd7ed558ccdu;
    state_ ^= state_ >> 32;
  }
  void add(const Dims& dims) {
    add(dims.rank());
    for (const Index n : dims) add(n);
  }
  void add(std::string_view text) {
    add(static_cast<Index>(text.size()));
    for (const char c : text) add(static_cast<Index>(c));
  }
  std::uint64_t value() const { return digest_mix(state_); }
  Digest digest() const {
    const std::uint64_t a = digest_mix(state_), b = digest_mix(state_ + kStep);
    return {{static_cast<std::uint32_t>(a), static_cast<std::uint32_t>(a >> 32), static_cast<std::uint32_t>(b),
             static_cast<std::uint32_t>(b >> 32)}};
  }

 private:
  static constexpr std::uint64_t kStep = 0x9e3779b97f4a7c15u;
  std::uint64_t state_;
};

Digest digest_of(const RankMove& move, std::uint64_t tensor_seed) {
  Mixer mix(tensor_seed);
  mix.add(move.from);
  mix.add(move.to);
  mix.add(move.box.origin);
  mix.add(move.box.shape);
  return mix.digest();
}

constexpr Index kEveryStage = -1;

// ---- one side: how a tensor lies on a mesh

// Splits of each dimension; the axes that are left replicate.
class Side {
 public:
  Side() = default;
  Side(const Mesh& mesh, const Placement& placement, int rank, Holders holders)
      : is_staged_(is_staged(mesh, placement)) {
    std::vector<std::string> left;
    for (const MeshAxis& axis : mesh.axes())
      if (!(is_staged_ && axis.name == "pp")) left.push_back(axis.name);
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

  static bool is_staged(const Mesh& mesh, const Placement& placement) {
    return placement.stage >= 0 && mesh.size("pp") > 1;
  }

  // Which part of dimension d a rank has.
  Index part(int d, Index rank) const { return parts_[static_cast<std::size_t>(d)].number(rank); }
  Index replica(Index rank) const { return replicas_.number(rank); }
  // What being the k-th replica adds to a rank.
  Index replica_rank(Index k) const { return replicas_.rank(k); }
  Index holders() const { return holders_; }  // replicas that have what they hold, the first ones

 private:
  bool is_staged_ = false;
  std::vector<SubMesh> parts_;
  SubMesh replicas_;
  Index holders_ = 1;
};

Error bad_placement(const PlacedTensor& tensor, const std::string& what) {
  return usage_error("tensor '" + printable(tensor.name) + "' " + to_string(tensor.shape) + ": " + what);
}

Status check_splits(const Mesh& mesh, const PlacedTensor& tensor) {
  std::set<std::string_view> used;
  if (Side::is_staged(mesh, tensor.placement)) used.insert("pp");
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
  if (!Side::is_staged(mesh, tensor.placement)) return kEveryStage;
  if (tensor.placement.stage < mesh.size("pp")) return tensor.placement.stage;
  return bad_placement(tensor, "expected a stage below pp = " + with_commas(mesh.size("pp")) + ", got " +
                                   with_commas(tensor.placement.stage));
}

// ---- tensors

// Tensors that both sides cut alike: those of a model's layers.
struct Kind {
  int rank = 0;
  std::vector<const Overlay*> dims;
  Side from, to;
  const FragmentGrid* grid = nullptr;  // a catalog's: the source's numbers are cells of it
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
  const Kind* kind = nullptr;  // one of the two is null
  const Irregular* irregular = nullptr;
  std::uint64_t seed = 0;   // of its moves' digests
  Index element_bytes = 1;  // of the target's dtype
  Index from_stage = kEveryStage, to_stage = kEveryStage;
};

// Items of each stage, in order.
class Stages {
 public:
  void add(Index stage, std::size_t item) { items_[stage].push_back(item); }
  // Those of a stage and of every stage, in order.
  std::vector<std::size_t> of(Index stage) const {
    std::vector<std::size_t> out;
    std::merge(list(stage).begin(), list(stage).end(), list(kEveryStage).begin(), list(kEveryStage).end(),
               std::back_inserter(out));
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

// What tells placements on one mesh apart, stages aside.
void append_key(std::string& key, const Mesh& mesh, const Placement& placement) {
  key += Side::is_staged(mesh, placement) ? 's' : 'e';
  for (const Split& split : placement.splits) {
    key += std::to_string(split.dim) + '/' + std::to_string(split.groups);
    for (const std::string& axis : split.axes) key += '.' + axis;
    key += ',';
  }
  key += ';';
}
void append_key(std::string& key, const Dims& shape) {
  for (const Index extent : shape) key += std::to_string(extent) + 'x';
  key += ';';
}

std::vector<Split> splits_of(const Placement& placement, int dim) {
  std::vector<Split> out;
  for (const Split& split : placement.splits)
    if (split.dim == dim) out.push_back(split);
  return out;
}

// What a rank has of a kind of tensors: a list of overlaps for each dimension.
using Lists = std::vector<std::span<const Overlap>>;
using Place = std::array<const Overlap*, kMaxRank>;

// Calls emit(place) for every combination of overlaps, the last dimension's the fastest.
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

Error no_source(const PlacedTensor& wanted) {
  return usage_error("plan: no source for tensor '" + printable(wanted.name) + "'");
}
Error other_shape(const PlacedTensor& wanted, const Dims& given) {
  return usage_error("tensor '" + printable(wanted.name) + "': expected shape " + to_string(wanted.shape) + ", got " +
                     to_string(given));
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

}  // namespace

// Everything that was found out before any rank asked, and finding it out.
struct RankPlan::Parts {
  Parts(const Mesh& from, const Mesh& to, const RankPlanOptions& how)
      : source_mesh(from), target_mesh(to), source_stages(from, {"pp"}), target_stages(to, {"pp"}), options(how) {}

  Mesh source_mesh, target_mesh;
  SubMesh source_stages, target_stages;
  RankPlanOptions options;
  const Catalog* catalog = nullptr;  // null: the source is placed

  std::vector<Item> items;
  Stages giving, getting;  // items
  std::unordered_map<std::string, std::unique_ptr<Kind>> kinds;
  std::unordered_map<std::string, std::unique_ptr<Overlay>> overlays;
  std::vector<std::unique_ptr<Irregular>> irregular;
  // Grids of the catalog's fragments, by the hash of their boxes; null where there is none.
  struct KnownGrid {
    const FragmentList* fragments;
    std::unique_ptr<FragmentGrid> grid;
  };
  std::unordered_multimap<std::uint64_t, KnownGrid> grids;

  // Whether the rank that will be asked for has a part in a tensor of these stages.
  bool concerns_us(Index from_stage, Index to_stage) const {
    if (!options.only) return true;
    const auto in_stage = [&](const Mesh& mesh, const SubMesh& stages, Index stage) {
      return *options.only < mesh.ranks() && (stage == kEveryStage || stages.number(*options.only) == stage);
    };
    return in_stage(target_mesh, target_stages, to_stage) ||
           (!catalog && in_stage(source_mesh, source_stages, from_stage));
  }

  void add(Item item, const PlacedTensor& tensor) {
    item.element_bytes = byte_size(tensor.dtype);
    Mixer seed;
    seed.add(tensor.name);
    seed.add(static_cast<Index>(tensor.dtype));
    seed.add(tensor.shape);
    item.seed = seed.value();
    giving.add(item.from_stage, items.size());
    getting.add(item.to_stage, items.size());
    items.push_back(item);
  }

  Result<const Overlay*> overlay(std::string key, const std::vector<Cut>& source, const std::vector<Cut>& target) {
    auto& slot = overlays[std::move(key)];
    if (!slot) slot = std::make_unique<Overlay>(TRY(Overlay::make(source, target)));
    return slot.get();
  }

  Result<const Kind*> kind_of(const PlacedTensor& from, const PlacedTensor& to) {
    std::string key;
    append_key(key, to.shape);
    append_key(key, source_mesh, from.placement);
    append_key(key, target_mesh, to.placement);
    auto& slot = kinds[key];
    if (slot) return slot.get();
    TRY(check_splits(source_mesh, from));
    TRY(check_splits(target_mesh, to));
    auto kind = std::make_unique<Kind>();
    kind->rank = to.shape.rank();
    kind->from = Side(source_mesh, from.placement, to.shape.rank(), options.source);
    kind->to = Side(target_mesh, to.placement, to.shape.rank(), options.target);
    for (int d = 0; d < to.shape.rank(); ++d) {
      const Placement mine{splits_of(from.placement, d), -1}, theirs{splits_of(to.placement, d), -1};
      std::string name = std::to_string(to.shape[d]) + ':';
      append_key(name, source_mesh, mine);
      append_key(name, target_mesh, theirs);
      kind->dims.push_back(TRY(overlay(std::move(name), cuts_of(source_mesh, mine.splits, to.shape[d]),
                                       cuts_of(target_mesh, theirs.splits, to.shape[d]))));
    }
    slot = std::move(kind);
    return slot.get();
  }

  Result<const Kind*> kind_of(const FragmentGrid& grid, const PlacedTensor& to) {
    std::string key = std::to_string(reinterpret_cast<std::uintptr_t>(&grid)) + ':';
    append_key(key, target_mesh, to.placement);
    auto& slot = kinds[key];
    if (slot) return slot.get();
    TRY(check_splits(target_mesh, to));
    auto kind = std::make_unique<Kind>();
    kind->rank = to.shape.rank();
    kind->grid = &grid;
    kind->to = Side(target_mesh, to.placement, to.shape.rank(), options.target);
    for (int d = 0; d < to.shape.rank(); ++d)
      kind->dims.push_back(TRY(overlay(key + std::to_string(d), grid.dims[static_cast<std::size_t>(d)],
                                       cuts_of(target_mesh, splits_of(to.placement, d), to.shape[d]))));
    slot = std::move(kind);
    return slot.get();
  }

  const FragmentGrid* grid_of(const FragmentList& fragments, const Dims& shape) {
    const std::uint64_t hash = fragments.hash_of_boxes();
    const auto [begin, end] = grids.equal_range(hash);
    for (auto known = begin; known != end; ++known)
      if (known->second.fragments->has_boxes_of(fragments)) return known->second.grid.get();
    auto grid = FragmentGrid::find(fragments, shape);
    KnownGrid known{&fragments, grid ? std::make_unique<FragmentGrid>(*std::move(grid)) : nullptr};
    return grids.emplace(hash, std::move(known))->second.grid.get();
  }

  Status add_placed(const PlacedTensor& from, std::size_t source, const PlacedTensor& to, std::size_t tensor) {
    Item item;
    item.tensor = tensor;
    item.source = source;
    item.from_stage = TRY(stage_of(source_mesh, from));
    item.to_stage = TRY(stage_of(target_mesh, to));
    if (volume(to.shape) == 0 || !concerns_us(item.from_stage, item.to_stage)) return {};
    item.kind = TRY(kind_of(from, to));
    add(item, to);
    return {};
  }

  Status add_recorded(std::size_t source, const PlacedTensor& to, std::size_t tensor) {
    Item item;
    item.tensor = tensor;
    item.source = source;
    item.to_stage = TRY(stage_of(target_mesh, to));
    if (volume(to.shape) == 0 || !concerns_us(kEveryStage, item.to_stage)) return {};
    const FragmentList& fragments = catalog->tensors()[source].fragments;
    if (const FragmentGrid* grid = grid_of(fragments, to.shape)) {
      item.kind = TRY(kind_of(*grid, to));
    } else {
      TRY(check_splits(target_mesh, to));
      irregular.push_back(std::make_unique<Irregular>(Irregular{FragmentIndex(fragments), to.placement, to.shape}));
      item.irregular = irregular.back().get();
    }
    add(item, to);
    return {};
  }

  // ---- asking

  // A rank's share of each kind, made when the first of its tensors comes.
  class Shares {
   public:
    template <class Make>
    const Lists& of(const Kind& kind, Make make) {
      auto [found, is_new] = lists_.try_emplace(&kind);
      if (is_new)
        for (int d = 0; d < kind.rank; ++d) found->second.push_back(make(*kind.dims[static_cast<std::size_t>(d)], d));
      return found->second;
    }

   private:
    std::unordered_map<const Kind*, Lists> lists_;
  };

  // Calls visit(item, move).
  template <class Visitor>
  void each_into(Index rank, Visitor visit) const {
    Shares shares;
    for (const std::size_t i : getting.of(target_stages.number(rank))) {
      const Item& item = items[i];
      if (item.irregular) {
        each_irregular(item, rank, visit);
        continue;
      }
      const Kind& kind = *item.kind;
      const Index replica = kind.to.replica(rank);
      if (replica >= kind.to.holders()) continue;
      const Lists& mine =
          shares.of(kind, [&](const Overlay& overlay, int d) { return overlay.into(kind.to.part(d, rank)); });
      RankMove move = empty_move(item.tensor, kind.rank);
      move.to = rank;
      const Index stage = item.from_stage == kEveryStage ? 0 : source_stages.rank(item.from_stage);
      each_place(mine, [&](const Place& place) {
        Index from = stage;
        for (std::size_t d = 0; d < mine.size(); ++d) from += place[d]->from_add;
        if (kind.grid) {
          from = kind.grid->fragment[static_cast<std::size_t>(from)];
        } else if (kind.from.holders() > 1) {
          const Index turn = turn_of(place, kind.rank) * kind.to.holders() + replica;
          from += kind.from.replica_rank((turn + static_cast<Index>(item.tensor)) % kind.from.holders());
        }
        move.from = from;
        set_box(place, move);
        visit(item, move);
      });
    }
  }

  template <class Visitor>
  void each_irregular(const Item& item, Index rank, Visitor visit) const {
    const Irregular& tensor = *item.irregular;
    if (options.target == Holders::kFirst && !is_first_replica(target_mesh, tensor.placement, rank)) return;
    const FragmentList& fragments = catalog->tensors()[item.source].fragments;
    RankMove move = empty_move(item.tensor, tensor.shape.rank());
    move.to = rank;
    for (const LocalBox& piece : owned_boxes(target_mesh, tensor.placement, tensor.shape, rank))
      tensor.index.overlapping(piece.box, [&](std::size_t fragment, const Box& both) {
        move.from = static_cast<Index>(fragment);
        move.box = both;
        const Box whole_fragment = fragments.box(fragment);
        for (int d = 0; d < both.rank(); ++d) {
          move.from_at[d] = both.begin(d) - whole_fragment.begin(d);
          move.to_at[d] = piece.at[d] + both.begin(d) - piece.box.begin(d);
        }
        visit(item, move);
      });
  }

  template <class Visitor>
  void each_out_of(Index rank, Visitor visit) const {
    Shares shares;
    for (const std::size_t i : giving.of(source_stages.number(rank))) {
      const Item& item = items[i];
      const Kind& kind = *item.kind;
      const Index givers = kind.from.holders(), takers = kind.to.holders();
      const Index replica = kind.from.replica(rank);
      if (replica >= givers) continue;
      const Lists& mine =
          shares.of(kind, [&](const Overlay& overlay, int d) { return overlay.out_of(kind.from.part(d, rank)); });
      RankMove move = empty_move(item.tensor, kind.rank);
      move.from = rank;
      const Index stage = item.to_stage == kEveryStage ? 0 : target_stages.rank(item.to_stage);
      each_place(mine, [&](const Place& place) {
        Index to = stage;
        for (std::size_t d = 0; d < mine.size(); ++d) to += place[d]->to_add;
        set_box(place, move);
        // each_into's rule solved for the takers whose turn is ours.
        const Index turn = turn_of(place, kind.rank) * takers + static_cast<Index>(item.tensor);
        for (Index taker = (replica + givers - turn % givers) % givers; taker < takers; taker += givers) {
          move.to = to + kind.to.replica_rank(taker);
          visit(item, move);
        }
      });
    }
  }
};

Result<PlacedModel> place_model(const Catalog& model, const Mesh& mesh,
                                const std::function<Result<Placement>(const Tensor&)>& place) {
  PlacedModel placed{mesh, {}};
  placed.tensors.reserve(model.tensors().size());
  for (const Tensor& tensor : model.tensors())
    placed.tensors.push_back({tensor.name, tensor.dtype, tensor.shape, TRY(place(tensor))});
  return placed;
}

Digest digest_of(const PlacedModel& model) {
  Mixer mix;
  for (const MeshAxis& axis : model.mesh.axes()) {
    mix.add(axis.name);
    mix.add(axis.size);
  }
  for (const PlacedTensor& tensor : model.tensors) {
    mix.add(tensor.name);
    mix.add(static_cast<Index>(tensor.dtype));
    mix.add(tensor.shape);
    mix.add(tensor.placement.stage);
    mix.add(static_cast<Index>(tensor.placement.splits.size()));
    for (const Split& split : tensor.placement.splits) {
      mix.add(split.dim);
      mix.add(split.groups);
      mix.add(static_cast<Index>(split.axes.size()));
      for (const std::string& axis : split.axes) mix.add(axis);
    }
  }
  return mix.digest();
}

double imbalance(std::span<const Index> bytes) {
  double sum = 0, most = 0, loaded = 0;
  for (const Index n : bytes) {
    const auto b = static_cast<double>(n);
    sum += b;
    most = std::max(most, b);
    loaded += n > 0;
  }
  return sum > 0 ? most * loaded / sum - 1 : 0;
}

RankPlan::RankPlan(std::unique_ptr<Parts> parts) : parts_(std::move(parts)) {}
RankPlan::RankPlan(RankPlan&&) noexcept = default;
RankPlan& RankPlan::operator=(RankPlan&&) noexcept = default;
RankPlan::~RankPlan() = default;

Result<RankPlan> RankPlan::make(const PlacedModel& source, const PlacedModel& target, const RankPlanOptions& options) {
  auto parts = std::make_unique<Parts>(source.mesh, target.mesh, options);
  std::unordered_map<std::string_view, std::size_t> by_name;
  by_name.reserve(source.tensors.size());
  for (std::size_t i = 0; i < source.tensors.size(); ++i) by_name.emplace(source.tensors[i].name, i);
  for (std::size_t i = 0; i < target.tensors.size(); ++i) {
    const PlacedTensor& wanted = target.tensors[i];
    const auto found = by_name.find(wanted.name);
    if (found == by_name.end()) return no_source(wanted);
    const PlacedTensor& given = source.tensors[found->second];
    if (given.shape != wanted.shape) return other_shape(wanted, given.shape);
    TRY(parts->add_placed(given, found->second, wanted, i));
  }
  return RankPlan(std::move(parts));
}

Result<RankPlan> RankPlan::make(const Catalog& source, const PlacedModel& target, const RankPlanOptions& options) {
  auto parts = std::make_unique<Parts>(Mesh(), target.mesh, options);
  parts->catalog = &source;
  for (std::size_t i = 0; i < target.tensors.size(); ++i) {
    const PlacedTensor& wanted = target.tensors[i];
    const auto found = source.find(wanted.name);
    if (!found) return no_source(wanted);
    if (source.tensors()[*found].shape != wanted.shape) return other_shape(wanted, source.tensors()[*found].shape);
    TRY(parts->add_recorded(*found, wanted, i));
  }
  return RankPlan(std::move(parts));
}

Index RankPlan::target_ranks() const { return parts_->target_mesh.ranks(); }

void RankPlan::visit_into(Index rank, const Visit& visit) const {
  parts_->each_into(rank, [&](const Item&, const RankMove& move) { visit(move); });
}

void RankPlan::visit_out_of(Index rank, const Visit& visit) const {
  parts_->each_out_of(rank, [&](const Item&, const RankMove& move) { visit(move); });
}

namespace {

void add_to(RankPart& part, const Item& item, const RankMove& move) {
  part.moves.push_back(move);
  part.bytes += volume(move.box) * item.element_bytes;
  part.digest += digest_of(move, item.seed);
}

}  // namespace

RankPart RankPlan::into(Index rank) const {
  RankPart part;
  parts_->each_into(rank, [&](const Item& item, const RankMove& move) { add_to(part, item, move); });
  return part;
}

RankPart RankPlan::out_of(Index rank) const {
  RankPart part;
  parts_->each_out_of(rank, [&](const Item& item, const RankMove& move) { add_to(part, item, move); });
  return part;
}

RankPlanFigures RankPlan::all(int threads) const {
  const Parts& p = *parts_;
  const auto givers =
      static_cast<std::size_t>(p.catalog ? static_cast<Index>(p.catalog->files.size()) : p.source_mesh.ranks());
  RankPlanFigures total;
  total.into.resize(static_cast<std::size_t>(target_ranks()));
  total.out_of.resize(givers);
  struct Counts {
    Index moves = 0;
    std::vector<Index> out_of;
    Digest digest;
  };
  std::vector<Counts> counts(static_cast<std::size_t>(std::max(1, threads)));
  for (Counts& c : counts) c.out_of.resize(givers);
  const Status status =
      parallel_for(target_ranks(), static_cast<int>(counts.size()), [&](int thread, Index rank) -> Status {
        Counts& c = counts[static_cast<std::size_t>(thread)];
        Index bytes = 0;
        p.each_into(rank, [&](const Item& item, const RankMove& move) {
          const Index n = volume(move.box) * item.element_bytes;
          const Index giver =
              p.catalog ? p.catalog->tensors()[item.source].fragments.extent(static_cast<std::size_t>(move.from)).file
                        : move.from;
          c.out_of[static_cast<std::size_t>(giver)] += n;
          c.digest += digest_of(move, item.seed);
          ++c.moves;
          bytes += n;
        });
        total.into[static_cast<std::size_t>(rank)] = bytes;
        return {};
      });
  (void)status;  // counting cannot fail
  for (const Counts& c : counts) {
    total.moves += c.moves;
    total.digest += c.digest;
    std::transform(c.out_of.begin(), c.out_of.end(), total.out_of.begin(), total.out_of.begin(), std::plus<>());
  }
  total.bytes = std::accumulate(total.into.begin(), total.into.end(), Index{0});
  return total;
}

}  // namespace reshard
