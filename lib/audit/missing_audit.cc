// SPDX-License-Identifier: Apache-2.0
#include "lib/audit/missing_audit.h"

#include <algorithm>
#include <map>

#include "lib/base/names.h"
#include "lib/base/text.h"

namespace reshard {
namespace {

std::string missing_tensors(Index count, Index bytes) {
  return count_of(count, "tensor") + (count == 1 ? " is" : " are") + " missing from all files (" + human_bytes(bytes) +
         ").";
}

// Parameters without a tensor.
struct MissingParameters {
  const Parameter* head = nullptr;
  std::set<Index> layer_numbers;  // layers that are missing completely
  std::vector<const Parameter*> layers, experts, others;
};

bool is_head(const Parameter& p) { return p.rule->is_vocabulary() && p.rule->place == NameRule::Place::kLast; }

MissingParameters find_missing(const DescribedModel& subject, const StoredModel& stored, Index kept) {
  MissingParameters out;
  std::map<Index, Index> expected, gone;  // by layer
  std::vector<const Parameter*> rest;
  for (const Parameter& p : subject.expected) {
    if (p.layer >= 0 && p.layer < subject.config.num_hidden_layers()) ++expected[p.layer];
    if (stored.find(p) || stored.packed.contains(p.name) || p.is_tied || !subject.requires_it(p)) continue;
    if (kept > 0 && p.expert >= kept) continue;
    if (!out.head && is_head(p)) {
      out.head = &p;
      continue;
    }
    if (p.layer >= 0) ++gone[p.layer];
    rest.push_back(&p);
  }
  for (const auto& [layer, n] : gone)
    if (n == expected[layer]) out.layer_numbers.insert(layer);
  for (const Parameter* p : rest)
    (out.layer_numbers.contains(p->layer) ? out.layers
     : p->rule->is_per_expert()           ? out.experts
                                          : out.others)
        .push_back(p);
  return out;
}

void report_missing_tensors(const DescribedModel& subject, const std::vector<const Parameter*>& list, std::string id,
                            FindingList& findings) {
  if (list.empty()) return;
  Finding& f = findings.add(Severity::kError, std::move(id));
  std::map<const NameRule*, Index> by_rule;
  Index bytes = 0;
  for (const Parameter* p : list) {
    f.tensors.push_back(p->name);
    bytes += subject.bytes(*p);
    ++by_rule[p->rule];
  }
  f.what = std::string(list.size() == 1 ? "is" : "are") + " missing, and " + subject.config.path + " describes " +
           (list.size() == 1 ? "it" : "them");
  for (const auto& [rule, n] : by_rule) {
    if (f.why.size() == kShownKinds) {
      f.why.push_back("and " + count_of(by_rule.size() - kShownKinds, "kind") + " more");
      break;
    }
    f.why.push_back(leaf_of_rule(rule->hf) + ": " + with_commas(n) + (rule->when.empty() ? "" : ", required by ") +
                    std::string(rule->when));
  }
  if (list[0]->rule->is_per_expert()) {
    std::set<Index> experts;
    for (const Parameter* p : list) experts.insert(p->expert);
    f.why.push_back("experts " + ranges_text(experts) + " of " + with_commas(subject.config.number("num_experts")) +
                    ": if they are consecutive, a rank of expert parallelism did not write");
  }
  f.lost = missing_tensors(std::ssize(list), bytes);
}

void report_missing_head(const DescribedModel& subject, const Parameter& head, const std::string& other,
                         FindingList& findings) {
  Finding& f = findings.add(other.empty() ? Severity::kError : Severity::kNote, "missing-head");
  f.tensors = {head.name};
  if (!other.empty()) {
    f.what = "is absent: " + std::string(other == "score" ? "a classifier" : "a reward model") + " (" + other +
             " present), not an error";
    return;
  }
  f.what = "is missing, and " + subject.config.path + " does not tie it to the embedding";
  f.why.push_back("tie_word_embeddings is false: the head is a tensor of its own, " + to_string(head.shape));
  f.lost = "The head (" + human_bytes(subject.bytes(head)) +
           "), unless the run tied it: loaders would initialise it at random.";
  f.advice = "If the run tied its embeddings, set tie_word_embeddings to true in " + subject.config.path + ".";
}

bool is_one_run(const std::set<Index>& numbers) {
  return *numbers.rbegin() - *numbers.begin() + 1 == std::ssize(numbers);
}

void report_missing_layers(const DescribedModel& subject, const MissingParameters& missing, FindingList& findings) {
  const std::set<Index>& layers = missing.layer_numbers;
  if (layers.empty()) return;
  Finding& f = findings.add(Severity::kError, "missing-layers");
  Index bytes = 0;
  for (const Parameter* p : missing.layers) {
    f.tensors.push_back(p->name);
    bytes += subject.bytes(*p);
  }
  f.what = (layers.size() == 1 ? "layer " : "layers ") + ranges_text(layers) + " of 0 to " +
           with_commas(subject.config.num_hidden_layers() - 1) + " " + (layers.size() == 1 ? "is" : "are") + " missing";
  f.why.push_back(subject.config.path + " says num_hidden_layers = " + with_commas(subject.config.num_hidden_layers()) +
                  "; nothing of " + (layers.size() == 1 ? "this layer" : "these layers") + " is stored");
  if (is_one_run(layers) && layers.size() > 1)
    f.why.push_back("they are consecutive, as for a pipeline stage that was not saved or a file that was not copied");
  f.lost = missing_tensors(std::ssize(f.tensors), bytes);
  f.advice = "Look for the files of the other pipeline stages; if num_hidden_layers is wrong, correct the config.";
}

void report_unknown(const DescribedModel& subject, const StoredModel& stored, FindingList& findings) {
  if (stored.unknown.empty()) return;
  Finding& f = findings.add(Severity::kWarning, "name-unknown");
  f.what = count_of(std::ssize(stored.unknown), "tensor") + " with names that family " +
           std::string(subject.family.name) + " does not know";
  for (const Tensor* t : stored.unknown) f.tensors.push_back(t->name);
  f.advice =
      "Add --keep-unknown to copy a head or an adapter of your own. A misspelt name is a tensor that no "
      "loader will find.";
}

// Returns whether the unknown tensors are the missing parameters under other names: half of them have matching shapes,
// or all together have about as many elements.
bool are_renamed(const StoredModel& stored, const std::vector<const Parameter*>& missing) {
  std::map<Dims, Index> shapes;
  Index there = 0, expected = 0, alike = 0;
  for (const Tensor* t : stored.unknown) {
    ++shapes[t->shape];
    there += t->elements();
  }
  for (const Parameter* p : missing) {
    expected += volume(p->shape);
    if (const auto same = shapes.find(p->shape); same != shapes.end() && same->second > 0) {
      --same->second;
      ++alike;
    }
  }
  const bool holds_as_much = there > 0 && there >= expected / 2 && there / 2 <= expected;
  return !missing.empty() && !stored.unknown.empty() && (2 * alike >= std::ssize(missing) || holds_as_much);
}

void report_renamed(const DescribedModel& subject, const StoredModel& stored,
                    const std::vector<const Parameter*>& missing, FindingList& findings) {
  Finding& f = findings.add(Severity::kError, "names-other");
  std::vector<std::string> unknown;
  for (const Tensor* t : stored.unknown) unknown.push_back(t->name);
  Index expected = 0, there = 0;
  for (const Parameter* p : missing) expected += volume(p->shape);
  for (const Tensor* t : stored.unknown) there += t->elements();
  f.what = "no tensor has the name of " + count_of(std::ssize(missing), "parameter") + " that " + subject.config.path +
           " describes, and " + count_of(std::ssize(unknown), "tensor") + " have names that family " +
           subject.family.name + " does not know";
  for (const Parameter* p : missing) f.tensors.push_back(p->name);
  f.why.push_back("unknown: " + some_of(unknown));
  f.why.push_back("they have " + count_of(there, "element") + ", the missing parameters " + with_commas(expected) +
                  ": they seem to be the same under other names");
  f.advice = "Add --rename FROM=TO to translate names, or --family-file to describe a family that has them.";
}

void report_missing(const DescribedModel& subject, const StoredModel& stored, const MissingParameters& missing,
                    FindingList& findings) {
  if (missing.head) report_missing_head(subject, *missing.head, stored.other_head, findings);
  report_missing_layers(subject, missing, findings);
  report_missing_tensors(subject, missing.experts, "missing-experts", findings);
  report_missing_tensors(subject, missing.others, "missing-tensors", findings);
}

void report_extra(const DescribedModel& subject, const StoredModel& stored, FindingList& findings) {
  const ModelConfig& config = subject.config;
  std::vector<std::string> beyond, unexpected;
  Index deepest = 0;
  for (const auto& [parsed, tensor] : stored.extra) {
    const bool is_beyond = parsed.layer >= config.num_hidden_layers() + config.num_prediction_layers();
    if (is_beyond) deepest = std::max(deepest, parsed.layer);
    if (is_beyond || parsed.layer < config.num_hidden_layers())
      (is_beyond ? beyond : unexpected).push_back(tensor->name);
  }
  if (!beyond.empty()) {
    Finding& f = findings.add(Severity::kError, "extra-layers");
    f.tensors = std::move(beyond);
    f.what = "belong to layers that the model does not have";
    f.why.push_back(config.path + " says num_hidden_layers = " + with_commas(config.num_hidden_layers()) +
                    "; the files go up to layer " + with_commas(deepest));
    f.advice = "A loader drops them silently. Is it another model's config, or was the config edited?";
  }
  if (unexpected.empty()) return;
  Finding& f = findings.add(Severity::kWarning, "extra-tensors");
  f.what = unexpected.size() == 1 ? "is not part of the model that the config describes"
                                  : "are not part of the model that the config describes";
  f.tensors = std::move(unexpected);
  f.advice = "A loader drops what the config does not describe.";
}

}  // namespace

void audit_missing(const DescribedModel& subject, const StoredModel& stored, Index experts_kept,
                   FindingList& findings) {
  const MissingParameters missing = find_missing(subject, stored, experts_kept);
  std::vector<const Parameter*> all = missing.layers;
  all.insert(all.end(), missing.experts.begin(), missing.experts.end());
  all.insert(all.end(), missing.others.begin(), missing.others.end());
  if (missing.head && stored.other_head.empty()) all.push_back(missing.head);
  if (are_renamed(stored, all)) {
    report_renamed(subject, stored, all, findings);
  } else {
    report_missing(subject, stored, missing, findings);
    report_unknown(subject, stored, findings);
  }
  report_extra(subject, stored, findings);
}

std::string leaf_of_rule(std::string_view pattern) {
  for (const std::string_view suffix : {".weight"})
    if (pattern.ends_with(suffix)) pattern.remove_suffix(suffix.size());
  return std::string(pattern.substr(pattern.rfind('.') + 1));
}

std::string ranges_text(const std::set<Index>& numbers) {
  return join(runs_of({numbers.begin(), numbers.end()}, " to "), ", ");
}

}  // namespace reshard
