// Brings checkpoints under common names and a common order of rows:
//
//   canonical view   a catalog under Hugging Face names, its rows in Hugging Face order. The fragments are the same
//                    bytes: a rotary permutation is a doubled row stride, a fused projection a cut at head borders.
//
// Source and target are both brought into the canonical view, and the plan is made there. The planner, the executor and
// the verifier never hear of models.
#pragma once

#include <string>
#include <vector>

#include "lib/model/family.h"

namespace reshard {

struct ViewOptions {
  const Family* family = nullptr;
  const ModelConfig* config = nullptr;  // may be null where `hf_rows` is false and nothing is packed by head
  bool hf_rows = true;                  // false: both sides of the job have the same order of rows, which they keep
  bool keep_unknown = false;            // carry model tensors that no rule knows under their own names
  // Every stored element is in the view once: no tied head beside its embedding; an optimizer's number that a packed
  // tensor's parts share is the first part's.
  bool as_stored = false;
};
// The canonical view of a catalog; optimizer state is renamed and permuted with its parameter. The tensors that take
// part must be located if rows are to change. A model tensor that no rule knows is an error that lists them all.
// `dropped` receives the names of tensors left out (NameRule::is_dropped); `reshaped` those of tensors that were stored
// flat, all elements of what the config says has two dimensions or more.
Result<Catalog> canonical_view(const Catalog& catalog, const ViewOptions& options, std::vector<std::string>* dropped,
                               std::vector<std::string>* reshaped = nullptr);

// Of a model of no family: its tensors under their plain keys (parts.h), in their order. Fails where two have one.
Result<Catalog> plain_view(Catalog catalog);

// The family by whose rules reshard_manifest.json records digests; null: by none. Unsupported where it is not known.
Result<const Family*> recorded_family(const Json& manifest, Families families);
// The view in which it records them.
Result<Catalog> recorded_view(const Json& manifest, const Catalog& catalog, const ModelConfig* config,
                              Families families);

// How many of the tensors that a config describes are there, tied ones not counted.
struct Identity {
  Index expected = 0;
  Index present = 0;
};
// That the canonical view is the model the config describes: every parameter there, in its shape, and no other. Names
// the first tensors that are missing, differ or are too many. `complete` = false allows missing ones.
Result<Identity> check_against_config(const Catalog& view, const Family& family, const ModelConfig& config,
                                      bool complete);

}  // namespace reshard
