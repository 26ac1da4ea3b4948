// SPDX-License-Identifier: Apache-2.0
// Translates checkpoints to canonical names and row order:
//
//   canonical view   a catalog with Hugging Face names and row order. The fragments are the same bytes: a rotary
//                    permutation is a doubled row stride, a fused projection is split at head boundaries.
//
// Both source and target are translated to the canonical view, and the plan is made there. The planner, the engine and
// the verifier know nothing of models.
#pragma once

#include <string>
#include <vector>

#include "lib/model/family.h"

namespace reshard {

struct ViewOptions {
  const Family* family = nullptr;
  const ModelConfig* config = nullptr;  // may be null if `hf_rows` is false and nothing is packed by head
  bool hf_rows = true;                  // false: both sides have the same row order and keep it
  bool keep_unknown = false;            // keep unknown model tensors under their own names instead of failing
  // Whether every stored element occurs once: without a tied head next to its embedding, and with an optimizer's scalar
  // of a packed tensor as the first part's only.
  bool as_stored = false;
  // Of the names. It decides between conventions with the same names.
  Convention convention = Convention::kHf;
  // The convention of the catalog with which this one is planned or compared. Both have the same columns divided.
  Convention other = Convention::kHf;
};
// Divides the last dimension of each tensor of a canonical catalog whose columns `convention` stores as separate
// tensors (Tensor::columns). A view of such tensors has them divided, so that whatever is planned with it must have.
Status divide_columns(Catalog& catalog, const Family& family, Convention convention);
// Returns whether two conventions store the same values of every parameter (ValueChange).
bool same_values(const Family& family, Convention a, Convention b);

// Returns the canonical view of a catalog; optimizer state is renamed and permuted with its parameter. The
// participating tensors must be located if rows change. Model tensors that no rule knows are an error that lists them
// all. `dropped` receives the names of tensors left out (NameRule::is_dropped()), and `reshaped` those of tensors
// stored flat, with all elements, for which the config gives two or more dimensions.
Result<Catalog> canonical_view(const Catalog& catalog, const ViewOptions& options, std::vector<std::string>* dropped,
                               std::vector<std::string>* reshaped = nullptr);

// Returns the view for a model of no family: its tensors with their plain keys (parts.h), in the same order. Fails if
// two have the same key.
Result<Catalog> plain_view(Catalog catalog);

// Returns the family by whose rules reshard_manifest.json records digests, or null if by none. Unsupported if the
// family is unknown.
Result<const Family*> recorded_family(const Json& manifest, Families families);
// Returns the view to which the manifest's digests refer.
Result<Catalog> recorded_view(const Json& manifest, const Catalog& catalog, const ModelConfig* config,
                              Families families);

// How many of the config's tensors are present, without tied ones.
struct Identity {
  Index expected = 0;
  Index present = 0;
};
// Checks that the canonical view is the model that the config describes: all parameters are present in their shapes,
// and no others. The error names the first tensors that are missing, different or unexpected. `complete` = false allows
// missing ones.
Result<Identity> check_against_config(const Catalog& view, const Family& family, const ModelConfig& config,
                                      bool complete);

}  // namespace reshard
