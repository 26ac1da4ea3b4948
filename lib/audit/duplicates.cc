// SPDX-License-Identifier: Apache-2.0
#include "lib/audit/duplicates.h"

#include <algorithm>
#include <map>
#include <set>
#include <tuple>

#include "lib/audit/values.h"
#include "lib/base/text.h"

namespace reshard {
namespace {

constexpr Index kFewElements = 64;      // smaller matrices may be equal by chance
constexpr std::size_t kCompared = 100;  // names in one group: thousands of experts may all be zero

using Group = std::vector<const Tensor*>;  // tensors of equal values

bool is_tied(const Tensor& head, const Tensor& other, const Model& model) {
  const auto parsed = parse_name(*model.family, head.key());
  return parsed && !parsed->rule->tied_to.empty() &&
         canonical_key(*model.family, other.key()) == parsed->rule->tied_to &&
         (!model.config || model.config->tie_word_embeddings());
}

// Returns the length of the longest prefix of whole components that all keys of the model share: the wrapper of a model
// of unknown family, whose own names are unknown too.
std::size_t common_prefix(const Catalog& view) {
  std::optional<std::string_view> common;
  for (const Tensor& t : view.tensors()) {
    if (split_state_key(t.key()).kind != StateKind::kModel) continue;
    const std::string_view key = t.key();
    if (!common) common = key;
    const auto differ = std::mismatch(common->begin(), common->end(), key.begin(), key.end()).first;
    common = common->substr(0, differ - common->begin());
  }
  return common ? common->rfind('.') + 1 : 0;
}

// Returns whether equal weights under these two names should be reported. Their first `prefix` characters are a
// wrapper's.
bool is_news(const Tensor& a, const Tensor& b, const Model& model, std::size_t prefix) {
  const auto ends_with = [&](const std::string& name, const std::string& end) {
    return std::string_view(name).substr(prefix).ends_with("." + end.substr(prefix));
  };
  const auto parameter = [&](const Tensor& t) {
    return model.family ? canonical_key(*model.family, t.key()) : t.key();
  };
  if (parameter(a) == parameter(b)) return false;  // reported as "name-duplicate"
  const bool is_known = model.family && (parse_name(*model.family, a.key()) || parse_name(*model.family, b.key()));
  if (!is_known) return ends_with(a.key(), b.key()) || ends_with(b.key(), a.key());
  return !is_tied(a, b, model) && !is_tied(b, a, model);
}

// Masks and similar tensors, which every layer of old files has ("h.0.attn.bias").
bool is_derived(const Tensor& t, const Model& model) {
  const auto parsed = model.family ? parse_name(*model.family, t.key()) : std::nullopt;
  return parsed && parsed->rule->is_dropped();
}

std::vector<Group> alike(const Catalog& view, const std::vector<Digest>& digests, const Model& model) {
  std::map<std::tuple<std::string, DType, Dims>, Group> groups;
  for (std::size_t i = 0; i < view.tensors().size(); ++i) {
    const Tensor& t = view.tensors()[i];
    if (t.shape.rank() < 2 || t.elements() < kFewElements || split_state_key(t.key()).kind != StateKind::kModel ||
        is_derived(t, model))
      continue;
    groups[{digests[i].hex(), t.dtype, t.shape}].push_back(&t);
  }
  const std::size_t prefix = model.family ? 0 : common_prefix(view);
  std::vector<Group> out;
  for (const auto& entry : groups) {
    const Group& group = entry.second;
    const auto end = group.begin() + std::min(group.size(), kCompared);
    Group news;
    for (const Tensor* t : group)
      if (std::any_of(group.begin(), end,
                      [&](const Tensor* other) { return other != t && is_news(*t, *other, model, prefix); }))
        news.push_back(t);
    if (!news.empty()) out.push_back(std::move(news));
  }
  return out;
}

// Removes groups of constant matrices.
Result<std::vector<Group>> without_constants(std::vector<Group> groups, FilePool& files, const std::string& root,
                                             const std::vector<CatalogFile>& all_files, const RunOptions& options) {
  Catalog first;
  first.root = root;
  first.files = all_files;
  for (const Group& group : groups) TRY(first.add(*group[0]));
  RunOptions run = options;
  run.progress = nullptr;
  const ValueReport values = TRY(check_values(first, files, {}, run));
  std::size_t i = 0;
  std::erase_if(groups, [&](const Group&) { return values.tensors[i++].health.constant; });
  return groups;
}

Finding finding(Severity severity, std::vector<Group> groups) {
  Finding f{severity, "weights-twice", {}, "", {}, "", ""};
  std::sort(groups.begin(), groups.end(),
            [](const Group& a, const Group& b) { return natural_less(a[0]->name, b[0]->name); });
  f.what = groups.size() == 1 ? "hold the same values under " + count_of(std::ssize(groups[0]), "name")
                              : count_of(std::ssize(groups), "weight") + ", each stored under several names";
  for (const Group& group : groups) {
    std::vector<std::string> names;
    for (const Tensor* t : group) {
      f.tensors.push_back(t->name);
      if (names.size() < kShown) names.push_back(printable(t->name));
    }
    if (groups.size() > 1 && f.why.size() < kShown)
      f.why.push_back(join(names, " = ") + (group.size() > names.size() ? " = ..." : ""));
  }
  if (groups.size() > kShown) f.why.push_back("and " + with_commas(std::ssize(groups) - std::ssize(f.why)) + " more");
  std::sort(f.tensors.begin(), f.tensors.end(), natural_less);
  f.advice = severity == Severity::kNote
                 ? "Layers or experts that were copied, as model merging and upcycling do, and not trained since."
                 : "They are not declared as tied: a leftover copy (a wrapper, an average of the weights), "
                   "or a tie that the config does not mention. Add --exclude to leave one of them out of a conversion.";
  return f;
}

}  // namespace

Result<std::vector<Finding>> audit_duplicates(const Catalog& view, const std::vector<Digest>& digests,
                                              const Model& model, FilePool& files, const RunOptions& options) {
  std::vector<Group> groups = alike(view, digests, model), copies, others;
  std::vector<Finding> out;
  if (groups.empty()) return out;
  for (Group& group : TRY(without_constants(std::move(groups), files, view.root, view.files, options))) {
    const bool is_copy = std::all_of(group.begin(), group.end(), [&](const Tensor* t) {
      return pattern_of(t->key()) == pattern_of(group[0]->key());
    });
    (is_copy ? copies : others).push_back(std::move(group));
  }
  if (!others.empty()) out.push_back(finding(Severity::kWarning, std::move(others)));
  if (!copies.empty()) out.push_back(finding(Severity::kNote, std::move(copies)));
  return out;
}

}  // namespace reshard
