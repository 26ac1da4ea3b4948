// Two checkpoints of one model, whatever their formats, layouts and names: are they the same, and where not, by how
// much?
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
  ModelChoice model;  // of both; none: names are compared as they are
  // The config.json of both; empty: the one beside each, or beside the other where it has none, as a checkpoint that
  // was converted may have left its own behind.
  std::string config;
  std::string spool = "/tmp";
  RunOptions run;
  bool of_two_formats = false;  // each has objects of its own (extra_state), which are not compared
};

// What two checkpoints have in common, brought under the same names and row order.
class Comparison {
 public:
  // Locates the tensors both have. Refers to both readers.
  static Result<std::unique_ptr<Comparison>> prepare(Reader& a, Reader& b, ComparisonOptions options);

  struct Pair {
    std::size_t a = 0, b = 0;  // in the views
  };
  const Catalog& a() const { return a_view_; }
  const Catalog& b() const { return b_view_; }
  const std::vector<Pair>& pairs() const { return pairs_; }  // of equal name and shape
  const std::vector<Pair>& reshaped() const { return reshaped_; }
  // Kinds of state that one side has none of, derived tensors, and what a format has for itself, in words: they are not
  // compared, and not a difference.
  const std::vector<std::string>& not_compared() const { return not_compared_; }
  // Of models of no known family: what names begin with in one and in the other, in words (renaming.h).
  const std::vector<std::string>& renamed() const { return renamed_; }
  Index bytes() const;  // that a comparison reads, of both sides

  void set_progress(std::function<void(Index bytes)> progress) { options_.run.progress = std::move(progress); }

  // How the elements of two tensors of different dtypes are compared; the order of the two makes no difference.
  enum class Cast {
    kNone,       // as they are stored: of one dtype, or of two that no values are converted between
    kNarrower,   // in the narrower of two dtypes, which the other may have been rounded to
    kRecorded,   // of equal width, neither with all values of the other: as the manifest of one records its cast
    kUnrecorded  // the same, and no manifest records one: equal only where no value was changed
  };
  // Digests of all pairs, as stored and in the dtype in which they are compared: `a` equals `b` there if the tensors
  // are equal.
  struct Digests {
    Digest a_as_stored, b_as_stored, a, b;
    Cast cast = Cast::kNone;
  };
  Result<std::vector<Digests>> digests();
  Index checksums_checked() const { return checksums_; }

  // Tensors that cannot be compared element by element, and objects that only one side has although the other has some
  // of their kind, as sentences.
  std::vector<std::string> structural_differences() const;
  // Names of objects that are in both and differ in bytes.
  Result<std::vector<std::string>> differing_objects();

  // How far apart the values are, in float64; for other types than floating point, how many elements differ.
  struct Distance {
    Index different = 0;     // elements that are not equal (NaN equals NaN)
    double max_abs = 0;      // max |a - b|
    double relative_l2 = 0;  // |a - b| / |a|
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
  struct Objects {  // of one of the two
    std::set<std::string> keys;
    std::set<StateKind> kinds;  // of what is not its own
  };
  Objects objects_of(const Catalog& catalog) const;
  bool is_in(const Objects& others, const Catalog& mine, const Blob& blob) const;
  bool may_be_alone(const Blob& blob) const;
  void leave_out_own(const Catalog& mine, const Catalog& others, const Objects& other_objects);
  std::vector<std::string> objects_of_one() const;
  // The canonical keys of an object: several where it is named after a packed tensor.
  std::vector<std::string> keys_of(const Catalog& catalog, const Blob& blob) const;

  Reader &a_, &b_;
  ComparisonOptions options_;
  Model a_model_, b_model_;  // of one family, or both of none
  Catalog a_view_, b_view_;
  std::vector<Pair> pairs_, reshaped_;
  std::vector<std::size_t> only_a_, only_b_;
  std::vector<std::string> not_compared_, renamed_;
  Index checksums_ = 0;
  bool has_own_ = false, has_own_groups_ = false;
};

}  // namespace reshard
