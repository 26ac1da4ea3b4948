// The plan of many ranks, of which each makes only its own part.
//
// make_plan (plan.h) cuts every box of a catalog with every other; a job of a thousand ranks needs no rank to know all
// of that. Here the target, and the source as well where nobody wrote its boxes down, is only described. What moves
// into a rank, and what moves out of it, follows from the description by arithmetic (overlay.h), in time that grows
// with the moves of this rank and not with the number of ranks. Every rank gets the same plan from the same
// description, so nothing is gathered: ranks compare what they were told (digest_of) and, if they like, what they found
// (RankPart::digest).
#pragma once

#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <vector>

#include "lib/plan/placed_model.h"

namespace reshard {

// Of ranks that hold the same boxes.
enum class Holders {
  kFirst,  // the first alone has them: in a checkpoint, where it is the one that writes
  kAll,    // each has them, in its memory
};

struct RankPlanOptions {
  // Of replicas that all have what they hold, each gives an equal share: the pieces that a box is cut into go to the
  // targets from its holders in turn.
  Holders source = Holders::kFirst;
  Holders target = Holders::kAll;
  // The only rank, of source and target, that will be asked for: tensors that it has no part in are passed over.
  std::optional<Index> only = std::nullopt;
};

// A box that goes from one local tensor to another.
struct RankMove {
  std::size_t tensor = 0;  // of the target's tensors
  Index from = 0;          // the source's rank; where the source is a catalog, the number of the tensor's fragment
  Index to = 0;            // the target's rank
  Box box;                 // of the whole tensor
  Dims from_at, to_at;     // its origin in what `from` and `to` hold of the tensor
};

// What one rank gets, or gives.
struct RankPart {
  std::vector<RankMove> moves;  // by tensor, then row-major by their place in the whole tensor
  Index bytes = 0;              // in the target's dtypes
  Digest digest;                // the sum over its moves: summed over all ranks, what they get is what they give
};

// All ranks' parts, counted.
struct RankPlanFigures {
  Index moves = 0;
  Index bytes = 0;            // in the target's dtypes
  std::vector<Index> into;    // bytes of each target rank
  std::vector<Index> out_of;  // bytes of each source rank; of each file where the source is a catalog
  Digest digest;              // the sum of all parts
};

// How much more than the mean the most loaded of them has: 0.05 for 5 %. Those that have nothing do not count.
double imbalance(std::span<const Index> bytes);

class RankPlan {
 public:
  // Fails, naming the tensor, where the source has none of a target's tensor, or one of another shape, and where a
  // placement makes no sense (a dimension or stage that is not there, one mesh axis used twice).
  static Result<RankPlan> make(const PlacedModel& source, const PlacedModel& target, const RankPlanOptions& options);
  // The source's boxes as they are recorded; must be validated. Refers to the catalog. `options.source` does not
  // matter: a tensor's fragments are read, its replicas are not.
  static Result<RankPlan> make(const Catalog& source, const PlacedModel& target, const RankPlanOptions& options);

  RankPlan(RankPlan&&) noexcept;
  RankPlan& operator=(RankPlan&&) noexcept;
  ~RankPlan();

  // Calls visit(move) for each move into a rank of the target. The move is the visitor's until it returns. Thread-safe.
  using Visit = std::function<void(const RankMove& move)>;
  void visit_into(Index rank, const Visit& visit) const;
  // The same for each move out of a rank of the source, which must not be a catalog. What goes from one rank to another
  // comes in the same order on both sides.
  void visit_out_of(Index rank, const Visit& visit) const;

  RankPart into(Index rank) const;
  RankPart out_of(Index rank) const;

  // Every rank's part into it, on several threads; no move is kept.
  RankPlanFigures all(int threads) const;

 private:
  class Tables;
  class Builder;
  explicit RankPlan(std::unique_ptr<Tables> tables);
  std::unique_ptr<Tables> tables_;
};

}  // namespace reshard
