// SPDX-License-Identifier: Apache-2.0
#include <utility>

#include "lib/audit/metadata_audits.h"
#include "lib/base/text.h"
#include "lib/model/quantization.h"

namespace reshard {
namespace {

// Returns whether audit_model() knows the exact names and shapes of its tensors.
bool is_described(const PackedWeight& weight, const Model& model) {
  return model.is_described() && is_known_to_families(weight.packing);
}

void report_missing(const PackedWeights& packed, const Model& model, FindingList& findings) {
  std::vector<std::string> missing, why;
  Index weights = 0;
  for (const PackedWeight& weight : packed.weights) {
    if (weight.missing.empty() || is_described(weight, model)) continue;
    ++weights;
    missing.insert(missing.end(), weight.missing.begin(), weight.missing.end());
    if (why.size() < kShown)
      why.push_back(printable(weight.name) + ", packed as " + std::string(packing_title(weight.packing)) + ", lacks " +
                    printable(join(weight.missing, ", ")));
  }
  if (weights == 0) return;
  if (weights > std::ssize(why)) why.push_back("and " + count_of(weights - std::ssize(why), "weight") + " more");
  Finding& f = findings.add(Severity::kError, "packed-missing");
  f.what = (missing.size() == 1 ? "is" : "are") + std::string(" missing, and ") + count_of(weights, "packed weight") +
           " cannot be read without " + (missing.size() == 1 ? "it" : "them");
  f.tensors = std::move(missing);
  f.why = std::move(why);
  f.lost = "The values of " + count_of(weights, "weight") + " are missing.";
  f.advice = "Look for the tensors in the model's other files; if they are lost, quantize the model again.";
}

void report_shapes(const Catalog& catalog, const PackedWeights& packed, const Model& model, FindingList& findings) {
  for (const PackedWeight& weight : packed.weights) {
    if (is_described(weight, model)) continue;
    const auto fault = shape_fault(catalog, weight);
    if (!fault) continue;
    Finding& f = findings.add(Severity::kError, "packed-shape");
    for (const PackedTensor& part : weight.parts) f.tensors.push_back(catalog.tensors()[part.tensor].name);
    f.what = "form one weight packed as " + std::string(packing_title(weight.packing)) + ", but " + *fault;
    f.advice = "One of them has the wrong size: a shard that was not gathered, or a tensor of another model.";
  }
}

}  // namespace

PackedAudit audit_packed(const Catalog& catalog, const Model& model) {
  const PackedWeights packed = find_packed(catalog, model.config_or_null());
  FindingList findings;
  report_missing(packed, model, findings);
  report_shapes(catalog, packed, model, findings);
  return {findings.take(), std::ssize(packed.weights), packed.empty() ? "" : packed_text(packed)};
}

}  // namespace reshard
