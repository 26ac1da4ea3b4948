// SPDX-License-Identifier: Apache-2.0
// The audits that verification.cc runs on metadata alone, each in a source of its name.
#pragma once

#include <cstddef>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "lib/audit/finding.h"
#include "lib/base/result.h"
#include "lib/checkpoint/catalog.h"
#include "lib/checkpoint/format.h"
#include "lib/model/model.h"

namespace reshard {

// Checks whether a checkpoint holds what its metadata claims: exact cover, files, offsets. It lists all faults, while
// validate() stops at the first.
struct StructureAudit {
  std::vector<Finding> findings;
  bool metadata_only = false;        // there are no data files, so they are not reported as missing
  bool is_readable = true;           // all data can be read as the metadata says
  std::set<std::size_t> unreadable;  // tensors whose data cannot be read
  bool headers_read = false;  // the headers around the pieces were checked against the metadata too (up to 100,000)
};

// Requires a checkpoint opened with OpenOptions{.files_too = false, .validated = false}, and locates its tensors.
// `spool` as in Reader::locate().
StructureAudit audit_structure(Reader& reader, int threads, const std::string& spool);

// Returns the indices of the other tensors.
std::vector<std::size_t> readable_tensors(const Catalog& catalog, const std::set<std::size_t>& unreadable);

// Reads the headers around the pieces of these tensors and, if that fails, those of each tensor separately. Returns a
// finding "header" for all that fail and "unread" for those in a form that no reader supports. Adds the indices of both
// to `unreadable`.
std::vector<Finding> locate_each(Reader& reader, const std::vector<std::size_t>& tensors, int threads,
                                 const std::string& spool, std::set<std::size_t>& unreadable);

// Checks what names and shapes tell about a model without a config: adapters that were not merged, empty placeholders,
// one parameter with two names, shapes that contradict each other.
// Findings: "adapter-unmerged" (warning), "adapter-pair", "adapter-prompt" and "placeholder" (errors), and if no config
// describes the model, so that audit_model() does not report them, "name-duplicate" and "shape-contradiction" (errors).
std::vector<Finding> audit_names(const Catalog& catalog, const Model& model);

// Returns whether a tensor is an empty weight, which no parameter should be.
bool is_placeholder(const Tensor& tensor, const Model& model);

// Checks a checkpoint's tensors against the model that a config.json describes: names, shapes, dtypes.
struct ModelAudit {
  std::vector<Finding> findings;
  Index expected_tensors = 0;  // in the config's table, without tied ones
  Index expected_elements = 0;
  Index looked_at = 0;        // model tensors of the checkpoint that the family knows
  bool head_is_tied = false;  // and not stored
  Index padded_rows = 0;  // of the vocabulary, with names of a trainer that pads it; 0: none, or the writer records it
  // The dtype of all parameters, "float32", if it is wider than the config's. Normal for training state, so it is not a
  // finding.
  std::string uniform_dtype;
};

// Requires a described model (Model::is_described()). Fails only if the config lacks numbers that the table needs.
Result<ModelAudit> audit_model(const Catalog& catalog, const Model& model);

// Checks packed weights (quantization.h) by themselves: all tensors are present, and their shapes fit together.
struct PackedAudit {
  std::vector<Finding> findings;
  Index looked_at = 0;  // packed weights
  std::string text;     // "14 weights packed as GPTQ"; empty: none
};

PackedAudit audit_packed(const Catalog& catalog, const Model& model);

// Checks optimizer state against its parameters, for any model: shapes, and missing state.
struct OptimizerAudit {
  std::vector<Finding> findings;
  Index looked_at = 0;  // tensors of optimizer state that name their parameter
};

// Findings "optimizer-shape" (error), "optimizer-orphan" and "optimizer-missing" (warnings).
OptimizerAudit audit_optimizer(const Catalog& catalog);

// Checks that a tokenizer has no more words than the model: the largest ids in tokenizer.json and added_tokens.json
// next to a config.
struct TokenizerAudit {
  Index tokens = 0;               // tokens checked
  std::string skipped;            // why it was skipped, a clause
  std::vector<Finding> findings;  // "tokenizer-larger" (warning)
};

// `directory` contains the tokenizer, `config_path` is the source of vocab_size.
TokenizerAudit audit_tokenizer(const std::string& directory, const std::string& config_path, Index vocab_size);

}  // namespace reshard
