// One dimension of a tensor as two sides share it out, and what the shares have in common.
//
// A placement cuts every dimension by itself, as each mesh axis cuts one dimension only. So what a source rank and a
// target rank have in common is the product of what they have in common along each dimension, and all of it is found in
// two sorted lists a dimension instead of in all pairs of ranks.
#pragma once

#include <span>
#include <string>
#include <vector>

#include "lib/base/result.h"
#include "lib/layout/layout.h"

namespace reshard {

// The ranks that differ from rank 0 along some axes of a mesh, numbered with the last of these axes the fastest.
class SubMesh {
 public:
  SubMesh() = default;  // rank 0 alone
  SubMesh(const Mesh& mesh, const std::vector<std::string>& axes);

  Index count() const { return count_; }
  Index rank(Index k) const;       // of the mesh: the k-th of them, 0 <= k < count()
  Index number(Index rank) const;  // which of them has the coordinates of a rank of the mesh along these axes

 private:
  struct Step {
    Index size, stride;  // of an axis, the stride in ranks
  };
  std::vector<Step> steps_;
  Index count_ = 1;
};

// An interval of a dimension and who holds it.
struct Cut {
  Index begin = 0;
  Index end = 0;
  Index at = 0;    // where it stands in what its holder has of the dimension
  Index part = 0;  // the holder: numbers from 0, each of whom may hold several intervals
  Index add = 0;   // what the holder's part adds to the number of the rank, or of the grid's cell
};

// How splits of one dimension share out [0, extent) among the ranks along their axes: part k belongs to the ranks whose
// number is k in the sub-mesh of the splits' axes, and adds that sub-mesh's rank(k). In order, without empty cuts.
std::vector<Cut> cuts_of(const Mesh& mesh, const std::vector<Split>& splits, Index extent);

// What a source's cut and a target's cut have in common.
struct Overlap {
  Index begin = 0;
  Index end = 0;
  Index from_at = 0, to_at = 0;    // where it stands in what the holders have of the dimension
  Index from_add = 0, to_add = 0;  // Cut::add
  Index turn = 0;                  // it is the turn-th of the overlaps of its source cut,
  Index turns = 1;                 // of which there are so many
};

class Overlay {
 public:
  // Both are sorted and cover the same [0, extent) exactly; an internal error where they do not.
  static Result<Overlay> make(const std::vector<Cut>& source, const std::vector<Cut>& target);

  // What a part gets, and what it gives, in ascending order. Nothing for a part that holds nothing.
  std::span<const Overlap> into(Index part) const { return into_.of(part); }
  std::span<const Overlap> out_of(Index part) const { return out_of_.of(part); }

 private:
  struct Entry {
    Index from_part, to_part;
    Overlap overlap;
  };
  // Overlaps by part.
  class Lists {
   public:
    void assign(const std::vector<Entry>& entries, Index Entry::*part);
    std::span<const Overlap> of(Index part) const;

   private:
    std::vector<Overlap> overlaps_;
    std::vector<std::size_t> first_;  // of each part, and the end
  };
  Lists into_, out_of_;
};

}  // namespace reshard
