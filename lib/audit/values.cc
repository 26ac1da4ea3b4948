// SPDX-License-Identifier: Apache-2.0
#include "lib/audit/values.h"

#include <algorithm>
#include <array>
#include <cstdio>
#include <iterator>
#include <memory>
#include <span>

#include "lib/base/text.h"
#include "lib/checkpoint/average_words.h"
#include "lib/checkpoint/state_key.h"
#include "lib/transport/collectives.h"

namespace reshard {
namespace {

constexpr std::size_t kWorst = 5;        // tensors shown in a finding
constexpr std::size_t kShownRanges = 4;  // ranges of rows in a sentence
constexpr std::size_t kTold = 1024;      // tensors per message between ranks
constexpr double kLargeWeight = 1e4;     // trained weights stay below 100 or so
constexpr double kLargeHalf = 60000;     // of a float16, whose maximum is 65504

// ---- Kinds of tensors

bool has_word(const std::vector<std::string>& words, const auto& wanted) {
  return std::any_of(words.begin(), words.end(), [&](const std::string& word) {
    return std::find(std::begin(wanted), std::end(wanted), word) != std::end(wanted);
  });
}

// Recognises "norm", "layernorm" and "rmsnorm", and GPT-2's "ln_1" and "ln_f".
bool is_norm(const std::vector<std::string>& words) {
  return std::any_of(words.begin(), words.end(), [](const std::string& w) { return w.ends_with("norm") || w == "ln"; });
}

// Returns whether training leaves a tensor at zero or at one value: computed tables, scales of quantised blocks, the
// half of a LoRA pair that starts at zero, masks.
bool is_derived(const std::vector<std::string>& words) {
  static constexpr std::array<std::string_view, 11> kDerived = {"freqs", "freq",  "rotary", "cos",  "sin",   "cached",
                                                                "mask",  "scale", "scales", "lora", "masked"};
  return has_word(words, kDerived);
}

bool is_any_float(DType dtype) {
  return is_floating(dtype) || dtype == DType::kFloat8E4M3 || dtype == DType::kFloat8E5M2 ||
         dtype == DType::kFloat8E4M3Fnuz || dtype == DType::kFloat8E5M2Fnuz;
}

// Returns whether zeros and repetitions in it should be reported.
bool is_weight(const Tensor& tensor, const std::vector<std::string>& words) {
  return is_any_float(tensor.dtype) && tensor.elements() >= HealthScan::kMinRowElements && words.back() != "bias" &&
         !is_derived(words) && !(tensor.shape.rank() < 2 && is_norm(words));
}

bool is_vocabulary(const Tensor& tensor, const ValueContext& context) {
  return tensor.shape.rank() == 2 &&
         std::find(context.vocabulary.begin(), context.vocabulary.end(), tensor.name) != context.vocabulary.end();
}

// ---- The kinds of problems

struct Kind {
  std::string_view id;
  Severity severity;
  std::string_view what;  // continues with "in 3 weights"
  std::string_view noun;
  std::string_view lost;
  std::string_view advice;
};

enum KindNumber : std::size_t {
  kNonFiniteWeights,
  kNonFiniteOptimizer,
  kZeroWeights,
  kConstantWeights,
  kZeroRows,
  kConstantRows,
  kUnusedTokens,
  kPaddingRows,
  kNearOverflow,
  kLargeValues,
  kKinds,
};

constexpr std::array<Kind, kKinds> kTable = {{
    {"non-finite-weights", Severity::kError, "NaN or infinite values", "model tensor",
     "The original values cannot be recovered from this checkpoint.",
     "Go back to the last checkpoint in which every weight is finite; training on from this one spreads them. The step "
     "at which they appeared shows in the loss or the gradient norm."},
    {"non-finite-optimizer", Severity::kError, "NaN or infinite values", "tensor of optimizer state",
     "The moments of these elements cannot be recovered from this checkpoint.",
     "The next optimizer step writes them into the weights. Go back to the last checkpoint without them, or drop the "
     "optimizer state and warm up again."},
    {"zero-weights", Severity::kWarning, "nothing but zeros", "weight", "",
     "Was the tensor loaded or initialised before the save? A rank that skips a tensor leaves it as it was "
     "allocated."},
    {"constant-weights", Severity::kWarning, "one value for every element", "weight", "",
     "A constant matrix was never initialised, or was overwritten."},
    {"zero-rows", Severity::kWarning, "rows of zeros", "weight", "",
     "Rows of zeros are outputs that never fire. Runs that begin or end at a multiple of a shard's rows point to a "
     "shard that was never filled."},
    {"constant-rows", Severity::kWarning, "rows of one repeated value", "weight", "",
     "Constant rows were never initialised, or were overwritten."},
    {"unused-tokens", Severity::kNote, "rows of zeros or of one value within the vocabulary", "tensor", "",
     "Tokens that the tokenizer reserves, or that never occurred in the data."},
    {"padding-rows", Severity::kNote, "dead rows after the true vocabulary", "tensor", "",
     "They only pad the vocabulary and can be removed."},
    {"near-overflow", Severity::kNote, "float16 values near the maximum, 65,504,", "tensor", "",
     "Slightly larger values become infinite. bfloat16 has the range of float32."},
    {"large-values", Severity::kNote, "values above 10,000", "weight", "",
     "Trained weights are rarely larger than 100: check the loss around the step of this checkpoint."},
}};

std::string number_text(double v) {
  char text[32];
  std::snprintf(text, sizeof text, "%.4g", v);
  return text;
}

std::string rows_of(const RowSet& rows, Index of) {
  return (rows.count == 1 ? "row " : with_commas(rows.count) + " of " + count_of(of, "row") + ": ") + rows_text(rows);
}

// Collects the cases of each kind.
class CaseCollector {
 public:
  explicit CaseCollector(const ValueContext& context) : context_(context) {}

  void look_at(const Tensor& tensor, const TensorHealth& h) {
    const StateKind state = split_state_key(tensor.key()).kind;
    if (state == StateKind::kOther || h.elements == 0) return;
    const std::vector<std::string> words = words_in_name(tensor.key());
    const bool finite = h.nans + h.infs == 0;
    const bool mask = h.nans == 0 && is_derived(words);  // masks contain minus infinity
    if (!finite && !mask)
      add_non_finite(state == StateKind::kModel ? kNonFiniteWeights : kNonFiniteOptimizer, tensor, h);
    if (state != StateKind::kModel) return;
    if (!is_derived(words)) add_range(tensor, h);
    if (!is_weight(tensor, words)) return;
    if (h.zeros == h.elements) {
      add(kZeroWeights, tensor, static_cast<double>(h.elements), count_of(h.elements, "element"));
    } else if (finite && h.constant && tensor.shape.rank() >= 2) {
      add(kConstantWeights, tensor, static_cast<double>(h.elements),
          count_of(h.elements, "element") + " of magnitude " + number_text(h.absmax));
    } else if (is_vocabulary(tensor, context_)) {
      add_vocabulary_rows(tensor, h);
    } else {
      add_rows(kZeroRows, tensor, h.rows.zero);
      if (finite) add_rows(kConstantRows, tensor, h.rows.constant);
    }
  }

  std::vector<Finding> findings() {
    std::vector<Finding> out;
    for (std::size_t k = 0; k < kKinds; ++k)
      if (!cases_[k].empty()) out.push_back(finding(kTable[k], cases_[k]));
    return out;
  }

 private:
  struct Case {
    std::string tensor;
    double weight = 0;  // larger is worse
    std::string text;
  };

  void add(KindNumber kind, const Tensor& tensor, double weight, std::string text) {
    cases_[kind].push_back({tensor.name, weight, std::move(text)});
  }

  void add_non_finite(KindNumber kind, const Tensor& tensor, const TensorHealth& h) {
    add(kind, tensor, static_cast<double>(h.nans + h.infs),
        with_commas(h.nans) + " NaN and " + with_commas(h.infs) + " infinite of " + count_of(h.elements, "element") +
            (tensor.shape.rank() > 0 ? ", the first at index " + with_commas(h.first_not_finite_row) + " of dimension 0"
                                     : ""));
  }

  void add_range(const Tensor& tensor, const TensorHealth& h) {
    if (!is_floating(tensor.dtype)) return;
    const std::string text = "the largest magnitude is " + number_text(h.absmax);
    if (tensor.dtype == DType::kFloat16 && h.absmax > kLargeHalf)
      add(kNearOverflow, tensor, h.absmax, text);
    else if (h.absmax > kLargeWeight)
      add(kLargeValues, tensor, h.absmax, text);
  }

  void add_rows(KindNumber kind, const Tensor& tensor, const RowSet& rows) {
    if (rows.count > 0) add(kind, tensor, static_cast<double>(rows.count), rows_of(rows, tensor.shape[0]));
  }

  void add_vocabulary_rows(const Tensor& tensor, const TensorHealth& h) {
    const Index rows = tensor.shape[0], begin = padding_begins(tensor, context_), known = begin < 0 ? rows : begin;
    const auto say = [&](KindNumber kind, const RowSet& set, std::string_view value, Index of, std::string_view where) {
      if (set.count > 0)
        add(kind, tensor, static_cast<double>(set.count),
            with_commas(set.count) + " of the " + count_of(of, "row") + std::string(where) + " hold " +
                std::string(value) + ": " + rows_text(set));
    };
    const std::string past = " after the true vocabulary of " + with_commas(known);
    say(kUnusedTokens, h.rows.zero, "zeros", known, "");
    say(kUnusedTokens, h.rows.constant, "one value", known, "");
    say(kPaddingRows, h.tail.zero, "zeros", rows - known, past);
    say(kPaddingRows, h.tail.constant, "one value", rows - known, past);
  }

  static Finding finding(const Kind& kind, std::vector<Case>& cases) {
    Finding f;
    f.severity = kind.severity;
    f.id = kind.id;
    for (const Case& c : cases) f.tensors.push_back(c.tensor);
    std::sort(f.tensors.begin(), f.tensors.end(), natural_less);
    f.tensors.erase(std::unique(f.tensors.begin(), f.tensors.end()), f.tensors.end());
    const auto n = std::ssize(f.tensors);
    const bool plural = n != 1;
    std::string noun(kind.noun);
    if (plural) noun.insert(std::min(noun.find(" of "), noun.size()), "s");
    f.what = std::string(kind.what) + " in " + with_commas(n) + " " + noun;
    std::stable_sort(cases.begin(), cases.end(), [](const Case& a, const Case& b) { return a.weight > b.weight; });
    for (std::size_t i = 0; i < std::min(kWorst, cases.size()); ++i)
      f.why.push_back(printable(cases[i].tensor) + ": " + cases[i].text);
    if (cases.size() > kWorst) f.why.push_back("and " + with_commas(cases.size() - kWorst) + " more");
    f.lost = kind.lost;
    f.advice = kind.advice;
    return f;
  }

  const ValueContext& context_;
  std::array<std::vector<Case>, kKinds> cases_;
};

// ---- One pass over the data

// Returns the memory for the row state of tensors in progress, at most one per thread.
Index row_memory(const Catalog& view, const RunOptions& options) {
  Index largest = 0;
  for (const Tensor& t : view.tensors()) largest = std::max(largest, HealthScan::row_memory(t.shape));
  return largest * worker_count(options);
}

// A tensor's health in the form that is sent between ranks.
struct HealthRecord {
  struct Rows {
    Index count = 0, ranges = 0;
    std::array<RowRange, RowSet::kMaxRanges> range{};
  };
  Index elements = 0, nans = 0, infs = 0, zeros = 0, first_not_finite_row = -1;
  double absmax = 0;
  bool constant = true, rows_seen = false;
  std::array<Rows, 4> rows;
  int first_exponent = 0, exponents = 0;
  std::array<Index, Exponents::kCount> by_exponent{};
};

// Returns the row sets of a health, const or not.
template <class Health>
auto row_sets(Health& h) {
  return std::array{&h.rows.zero, &h.rows.constant, &h.tail.zero, &h.tail.constant};
}

HealthRecord to_record(const TensorHealth& h) {
  HealthRecord r{h.elements, h.nans, h.infs, h.zeros, h.first_not_finite_row, h.absmax, h.constant, h.rows_seen, {}};
  r.first_exponent = h.exponents.first;
  r.exponents = static_cast<int>(h.exponents.counts.size());
  std::copy(h.exponents.counts.begin(), h.exponents.counts.end(), r.by_exponent.begin());
  const auto sets = row_sets(h);
  for (std::size_t i = 0; i < sets.size(); ++i) {
    r.rows[i].count = sets[i]->count;
    r.rows[i].ranges = std::ssize(sets[i]->ranges);
    std::copy(sets[i]->ranges.begin(), sets[i]->ranges.end(), r.rows[i].range.begin());
  }
  return r;
}

TensorHealth from_record(const HealthRecord& r) {
  TensorHealth h{r.elements, r.nans,      r.infs, r.zeros, r.absmax, r.first_not_finite_row,
                 r.constant, r.rows_seen, {},     {},      {}};
  h.exponents = {r.first_exponent, {r.by_exponent.begin(), r.by_exponent.begin() + r.exponents}};
  const auto sets = row_sets(h);
  for (std::size_t i = 0; i < sets.size(); ++i) {
    sets[i]->count = r.rows[i].count;
    sets[i]->ranges.assign(r.rows[i].range.begin(), r.rows[i].range.begin() + r.rows[i].ranges);
  }
  return h;
}

// Distributes the results: each tensor was examined by one rank, which has all its elements.
Status share_health(Transport* ranks, std::vector<TensorHealth>& health) {
  if (rank_count(ranks) == 1) return {};
  for (std::size_t begin = 0; begin < health.size(); begin += kTold) {
    const auto some = std::span(health).subspan(begin, std::min(kTold, health.size() - begin));
    std::vector<HealthRecord> records;
    for (const TensorHealth& h : some) records.push_back(to_record(h));
    TRY(combine_values(ranks, std::span(records), [](HealthRecord& mine, const HealthRecord& theirs) {
      if (theirs.elements > 0) mine = theirs;
    }));
    for (std::size_t i = 0; i < some.size(); ++i) some[i] = from_record(records[i]);
  }
  return {};
}

}  // namespace

Index padding_begins(const Tensor& tensor, const ValueContext& context) {
  const bool padded = context.vocab_size > 0 && is_vocabulary(tensor, context) && tensor.shape[0] > context.vocab_size;
  return padded ? context.vocab_size : -1;
}

std::string rows_text(const RowSet& rows) {
  std::vector<std::string> parts;
  Index said = 0;
  for (const RowRange& r : rows.ranges) {
    if (parts.size() == kShownRanges) break;
    parts.push_back(with_commas(r.begin) + (r.end - r.begin > 1 ? ".." + with_commas(r.end - 1) : ""));
    said += r.end - r.begin;
  }
  return join(parts, "; ") + (said < rows.count ? " and " + with_commas(rows.count - said) + " more" : "");
}

std::vector<Finding> judge_values(const Catalog& catalog, const std::vector<TensorHealth>& health,
                                  const ValueContext& context) {
  CaseCollector judge(context);
  for (std::size_t i = 0; i < health.size(); ++i) judge.look_at(catalog.tensors()[i], health[i]);
  return judge.findings();
}

std::string value_kind(std::string_view key) {
  const StateKey state = split_state_key(key);
  if (state.kind == StateKind::kModel) return "weights";
  return state.kind == StateKind::kOther || state.suffix.size() < 2 ? "other" : state.suffix.substr(1);
}

double ValueRow::zero_percent() const {
  return health.elements == 0 ? 0 : 100 * static_cast<double>(health.zeros) / static_cast<double>(health.elements);
}

Result<ValueReport> check_values(const Catalog& view, FilePool& files, const ValueContext& context,
                                 const RunOptions& options) {
  std::vector<DigestRequest> requests;
  std::vector<std::unique_ptr<HealthScan>> scans;
  for (std::size_t i = 0; i < view.tensors().size(); ++i) {
    const Tensor& t = view.tensors()[i];
    requests.push_back({i, t.dtype});
    scans.push_back(std::make_unique<HealthScan>(t.dtype, t.shape, padding_begins(t, context), context.exponents));
  }
  FileSource source(view, files);
  RunOptions run = options;
  run.memory -= row_memory(view, options);
  ValueReport report;
  report.proofs = TRY(digest_tensors(
      requests, source, run, [&](std::size_t i, const Box& box, Bytes elements) { scans[i]->add(box, elements); }));
  report.checksums_checked = source.checksums_checked();
  std::vector<TensorHealth> health;
  for (const auto& scan : scans) health.push_back(scan->health());
  TRY(share_health(options.ranks, health));
  for (std::size_t i = 0; i < health.size(); ++i)
    report.tensors.push_back({view.tensors()[i].name, value_kind(view.tensors()[i].key()), health[i]});
  report.findings = judge_values(view, health, context);
  return report;
}

}  // namespace reshard
