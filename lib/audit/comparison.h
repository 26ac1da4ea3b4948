// SPDX-License-Identifier: Apache-2.0
// Compares two checkpoints of one model, in any formats, layouts and names: are they equal, and if not, by how much do
// they differ?
#pragma once

#include <memory>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "lib/checkpoint/format.h"
#include "lib/checkpoint/state_key.h"
#include "lib/engine/run.h"
#include "lib/model/model.h"

namespace reshard {

struct ComparisonOptions {
  ModelChoice model;  // for both; none: names are compared unchanged
  // The config.json for both. Empty: the one next to each, or else next to the other, because a converted checkpoint
  // may have left its own behind.
  std::string config;
  std::string spool = "/tmp";
  RunOptions run;
  bool of_two_formats = false;     // each has objects of its own (extra_state), which are not compared
  SameValue same_value = nullptr;  // none: objects are equal if their bytes are
};

// Returns the dtype in which distances() compares `t` with `other`: the stored one, or the one that the model computes
// in if `other` has that.
DType compared_dtype(const Tensor& t, const Tensor& other);

// What two checkpoints have in common, with the same names and row order.
class Comparison {
 public:
  // Locates the tensors that both have. Both readers must outlive the result.
  static Result<std::unique_ptr<Comparison>> prepare(Reader& a, Reader& b, ComparisonOptions options);

  struct Pair {
    std::size_t a = 0, b = 0;  // indices in the views
  };
  const Catalog& a() const { return a_view_; }
  const Catalog& b() const { return b_view_; }
  const std::vector<Pair>& pairs() const { return pairs_; }  // equal name and shape
  const std::vector<Pair>& reshaped() const { return reshaped_; }
  // Describes what is not compared and not a difference: kinds of state that one side lacks, derived tensors, and a
  // format's own data.
  const std::vector<std::string>& not_compared() const { return not_compared_; }
  // Describes renamed prefixes of models of no known family (renaming.h).
  const std::vector<std::string>& renamed() const { return renamed_; }
  Index bytes() const;  // that a comparison reads from both sides

  void set_progress(std::function<void(Index bytes)> progress) { options_.run.progress = std::move(progress); }

  // How the elements of two tensors of different dtypes are compared, in either order of the two.
  enum class Cast {
    kNone,       // as stored: same dtype, or dtypes between which values are not converted
    kNarrower,   // in the narrower dtype, to which the other may have been rounded
    kRecorded,   // equal width, neither contains the other: with the cast that the manifest of one records
    kUnrecorded  // as kRecorded, but without a recorded cast: equal only if no value was changed
  };
  // The digests of a pair, as stored and in the dtype of the comparison; the tensors are equal if `a` equals `b`.
  struct Digests {
    Digest a_as_stored, b_as_stored, a, b;
    Cast cast = Cast::kNone;
  };
  Result<std::vector<Digests>> digests();
  Index checksums_checked() const { return checksums_; }

  // Returns sentences about tensors that cannot be compared element by element, and objects that only one side has
  // although the other has some of their kind.
  std::vector<std::string> structural_differences() const;
  // Returns the last of them: the sentences about objects.
  std::vector<std::string> objects_of_one() const;
  // Returns the names of objects that are on both sides with different values.
  Result<std::vector<std::string>> differing_objects();

  // The distance of two tensors in float64; for types other than floating point, only the number of differing elements.
  // Masters that stand for a model's weights are rounded first if the other side has the weights (compared_dtype()).
  struct Distance {
    Index different = 0;      // elements that are not equal (NaN equals NaN)
    double max_abs = 0;       // max |a - b|
    double relative_l2 = 0;   // |a - b| / |a|
    double l2 = 0, a_l2 = 0;  // |a - b|, |a|
  };
  Result<std::vector<Distance>> distances();

 private:
  Comparison(Reader& a, Reader& b, ComparisonOptions options) : a_(a), b_(b), options_(std::move(options)) {}
  Status make_views();
  Result<std::pair<Model, Model>> recognise_pair();
  Status match();
  void match_renamed();
  Status leave_out_ties();
  bool may_be_tied(const Tensor& t) const;
  void cut_padding(Catalog& view, std::size_t tensor, Index words) const;
  bool is_derived(const Tensor& t) const;
  bool is_own(const Blob& blob) const;
  bool has_groups_of_its_own() const;
  struct Objects {  // of one side
    std::set<std::string> keys;
    std::set<StateKind> kinds;  // without its own objects
  };
  Objects objects_of(const Catalog& catalog) const;
  bool is_of_model(const Catalog& catalog, const Blob& blob) const;
  // Returns the key of an object without what the names of the two sides' wrappers change.
  std::string key_of(const Catalog& catalog, const Blob& blob) const;
  StateKind kind_of(const Catalog& catalog, const Blob& blob) const { return state_kind(key_of(catalog, blob)); }
  bool is_in(const Objects& others, const Catalog& mine, const Blob& blob) const;
  bool may_be_alone(const Blob& blob) const;
  void leave_out_own(const Catalog& view, const Catalog& other_view, const Catalog& mine, const Objects& other_objects);
  // Returns the canonical keys of an object: several if it is named after a packed tensor.
  std::vector<std::string> keys_of(const Catalog& catalog, const Blob& blob) const;

  Reader &a_, &b_;
  ComparisonOptions options_;
  Model a_model_, b_model_;  // of the same family, or both without one
  Catalog a_view_, b_view_;
  std::vector<Pair> pairs_, reshaped_;
  std::vector<std::size_t> only_a_, only_b_;
  std::vector<std::string> not_compared_, renamed_;
  std::set<std::string, std::less<>> a_modules_, b_modules_;  // that have tensors in them, by their plain keys
  Index checksums_ = 0;
  bool has_own_ = false, has_own_groups_ = false;
};

}  // namespace reshard
