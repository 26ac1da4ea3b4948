// SPDX-License-Identifier: Apache-2.0
// Repairs of tensors whose shapes differ from those of config.json.
//
// Frameworks add rows (a padded vocabulary, key-value heads repeated on several tensor-parallel ranks) or lose rows (a
// vocabulary of which only rank 0's part was saved, experts joined into one matrix). Repairs edit only the fragments of
// a view: cutting rows drops fragments, repeating a row adds a fragment with stride 0, and a row of a donor is a
// fragment in another checkpoint's file. No data is copied; data is read only if a decision depends on it.
#pragma once

#include <functional>
#include <string>
#include <vector>

#include "lib/base/json.h"
#include "lib/checkpoint/format.h"
#include "lib/engine/run_options.h"
#include "lib/model/family.h"

namespace reshard {

// Repairs that the user asked for. Two are always made, because they lose nothing: rows of zeros beyond the vocabulary
// and copies of heads are dropped.
struct Repairs {
  bool vocabulary = false;  // cut rows that are not zeros; take missing ones from the donor
  bool experts = false;     // split matrices that hold the rows of several experts
};

struct RepairOptions {
  const Family* family = nullptr;
  const ModelConfig* config = nullptr;
  Repairs repairs;
  Reader* donor = nullptr;     // another checkpoint, the source of missing rows; null: none
  bool metadata_only = false;  // decide without reading data, as for a plan
  std::string spool = ".";
  RunOptions run;
  // Returns whether the source stores a tensor of the view; null: it stores all of them. A tied head may be in the view
  // only.
  std::function<bool(const std::string& canonical)> is_stored = nullptr;
};

// What was repaired, for people and for the manifest.
struct RepairResult {
  std::vector<std::string> notes;  // whole sentences
  Json repairs = Json::array();    // {"what": ..., "tensors": [...], ...}
};

// Changes a canonical view, whose tensors are located, to the shapes of config.json as far as `options.repairs` allows.
// `files` is the view's pool. An error names the --repair that would be needed and leaves the view unchanged. Tensors
// that differ in other ways are left unchanged.
Result<RepairResult> repair_to_config(Catalog& view, FilePool& files, const RepairOptions& options);

}  // namespace reshard
