// SPDX-License-Identifier: Apache-2.0
#include "lib/audit/vocabulary.h"

#include <algorithm>
#include <map>

#include "lib/base/text.h"
#include "lib/layout/padded_vocabulary.h"

namespace reshard {
namespace {

constexpr Index kMaxDegree = 1024;
constexpr std::size_t kShownCuts = 6;

bool is_power_of_two(Index n) { return (n & (n - 1)) == 0; }

// Moves degrees that are powers of two to the front; otherwise the order is kept.
void prefer_powers_of_two(std::vector<VocabularyCut>& cuts) {
  std::stable_partition(cuts.begin(), cuts.end(), [](const VocabularyCut& c) { return is_power_of_two(c.tp); });
}

std::string product_text(const VocabularyCut& c) {
  const Index blocks = c.padded / (c.multiple * c.tp);
  std::string out = std::to_string(c.multiple) + " x " + std::to_string(c.tp);
  return blocks == 1 ? out : out + " x " + with_commas(blocks);
}

std::string degree_text(const VocabularyCut& c) {
  return "tp=" + std::to_string(c.tp) +
         (c.multiple == 1 ? "" : ", make_vocab_size_divisible_by=" + std::to_string(c.multiple));
}

// Adds further (m, t) that fit equally well.
void add_others(const std::vector<VocabularyCut>& cuts, std::vector<std::string>& why) {
  if (cuts.size() < 2) return;
  std::vector<std::string> others;
  for (std::size_t i = 1; i < std::min(cuts.size(), kShownCuts); ++i)
    others.push_back(degree_text(cuts[i]) + " (padded to " + with_commas(cuts[i].padded) + ")");
  why.push_back("These fit as well: " + join(others, "; ") +
                (cuts.size() > kShownCuts ? "; and " + std::to_string(cuts.size() - kShownCuts) + " more" : ""));
}

// Returns the largest customary multiple that needs no padding at this degree, or 0.
Index harmless_multiple(Index size, Index tp) {
  Index best = 0;
  for (const auto& [m, framework] : kUsualMultiples)
    if (size % (m * tp) == 0) best = std::max(best, m);
  return best;
}

std::string how_to_avoid(Index size, const VocabularyCut& cut) {
  const Index m = harmless_multiple(size, cut.tp);
  std::string out = "To avoid it: ";
  if (m > 1)
    out += "make_vocab_size_divisible_by=" + std::to_string(m) + " (" + std::to_string(m) + " x " +
           std::to_string(cut.tp) + " = " + with_commas(m * cut.tp) + " divides " + with_commas(size) +
           ", so nothing is padded), or ";
  return out + "ColossalAI 0.4.8 or later.";
}

std::string rows_missing(Index rows, Index size, Index row_bytes) {
  const Index missing = size - rows;
  return "Rows " + with_commas(rows) + " to " + with_commas(size - 1) + " (" + count_of(missing, "row") + ", " +
         human_bytes(missing * row_bytes) + ") are missing from this checkpoint.";
}

Finding too_few(const VocabularyTensor& tensor, const VocabularyContext& context) {
  const Index rows = tensor.rows, size = context.size;
  Finding f;
  f.id = "vocabulary-shard";
  f.lost = rows_missing(rows, size, tensor.row_bytes);
  f.rows = {{"stored", rows}, {"lost", size - rows}};
  const auto cuts = explain_shard(rows, size, context.heads);
  if (cuts.empty()) {
    f.id = "vocabulary-rows";
    f.why.push_back("No tensor-parallel degree up to " + with_commas(kMaxDegree) + " with a customary padding leaves " +
                    count_of(rows, "row") + " to a rank");
    f.advice = "Compare with the config and the tokenizer of the training run; it is unknown which rows these are.";
    return f;
  }
  const VocabularyCut& cut = cuts[0];
  if (cut.padded == size) {
    f.why.push_back(with_commas(rows) + " = " + with_commas(size) + " / " + std::to_string(cut.tp) +
                    ": one tensor-parallel rank's rows, without padding");
    add_others(cuts, f.why);
    f.advice =
        "If the other ranks' files exist, the parts can be joined in rank order; if only rank 0 wrote, these rows "
        "are all that exists.";
    return f;
  }
  f.rows.push_back({"padding", cut.padded - size});
  f.why.push_back(with_commas(rows) + " = " + with_commas(cut.padded) + " / " + std::to_string(cut.tp) + ", and " +
                  with_commas(cut.padded) + " = " + product_text(cut) +
                  ": tensor-parallel rank 0's rows of a vocabulary padded to " + with_commas(cut.padded) + " (" +
                  (cut.multiple == 1 ? "" : "make_vocab_size_divisible_by=" + std::to_string(cut.multiple) + ", ") +
                  "tp=" + std::to_string(cut.tp) + ")");
  add_others(cuts, f.why);
  f.why.push_back("This is what ColossalAI 0.3.7 to 0.4.7 wrote when it padded (hpcaitech/ColossalAI#6108)" +
                  std::string(context.optimizer_missing ? "; optimizer/ is missing, which is consistent" : ""));
  f.advice =
      "To recover them: use rank files if they exist, another save of this run, or the base model's rows for "
      "tokens that were never trained. " +
      how_to_avoid(size, cut);
  return f;
}

Finding too_many(const VocabularyTensor& tensor, const VocabularyContext& context) {
  const Index rows = tensor.rows, size = context.size;
  Finding f;
  f.id = "vocabulary-padded";
  f.rows = {{"stored", size}, {"padding", rows - size}};
  const auto cuts = explain_padding(rows, size);
  const std::string tail = "rows " + with_commas(size) + " to " + with_commas(rows - 1) + " (" +
                           with_commas(rows - size) + ") are not tokens of this model";
  if (cuts.empty()) {
    f.why.push_back(with_commas(rows) + " is not a multiple to which Megatron or ColossalAI would pad " +
                    with_commas(size) + "; " + tail);
    f.advice = "A resized embedding (resize_token_embeddings) looks like this: then " + context.field + " in " +
               context.config_path + " should say " + with_commas(rows) + ".";
    return f;
  }
  f.why.push_back(with_commas(rows) + " = " + product_text(cuts[0]) + ": the vocabulary padded for " +
                  degree_text(cuts[0]) + " and not cut back; " + tail);
  add_others(cuts, f.why);
  f.advice = "Loaders that follow the config refuse these shapes. No data is lost: cut the tensor to " +
             count_of(size, "row") + ". Add --values to see whether the further rows are zero, like padding.";
  return f;
}

}  // namespace

std::vector<VocabularyCut> explain_shard(Index rows, Index size, Index heads) {
  std::vector<VocabularyCut> padded, exact;
  for (const auto& [m, framework] : kUsualMultiples)
    for (Index t = 2; t <= kMaxDegree; ++t) {
      const auto p = padded_vocabulary(size, m, t);
      if (p != rows * t) continue;
      if (p != size)
        padded.push_back({m, t, *p});
      else if (m == 1)
        exact.push_back({1, t, *p});
    }
  std::vector<VocabularyCut> cuts = exact.empty() ? std::move(padded) : std::move(exact);
  prefer_powers_of_two(cuts);
  std::vector<VocabularyCut> usable;
  for (const VocabularyCut& c : cuts)
    if (heads > 0 && heads % c.tp == 0) usable.push_back(c);
  return usable.empty() ? cuts : usable;
}

std::vector<VocabularyCut> explain_padding(Index rows, Index size) {
  std::vector<VocabularyCut> cuts;
  for (const auto& [m, framework] : kUsualMultiples)
    for (Index t = 1; m > 1 && t <= kMaxDegree; t *= 2)
      if (padded_vocabulary(size, m, t) == rows) cuts.push_back({m, t, rows});
  return cuts;
}

std::vector<Finding> audit_vocabulary(const std::vector<VocabularyTensor>& tensors, const VocabularyContext& context) {
  std::map<Index, std::vector<const VocabularyTensor*>> by_rows;
  for (const VocabularyTensor& t : tensors) by_rows[t.rows].push_back(&t);
  std::vector<Finding> out;
  for (const auto& [rows, same] : by_rows) {
    if (rows == context.size) continue;
    Finding f = rows < context.size ? too_few(*same[0], context) : too_many(*same[0], context);
    f.what = count_of(rows, "row") + "; " + context.config_path + " expects " + context.field + " = " +
             with_commas(context.size);
    for (const VocabularyTensor* t : same) f.tensors.push_back(t->name);
    for (const VocabularyTensor& other : tensors)
      if (other.rows != rows) f.why.push_back(other.name + " has " + with_commas(other.rows) + ", so the two differ");
    out.push_back(std::move(f));
  }
  return out;
}

}  // namespace reshard
