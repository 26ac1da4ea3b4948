// Bringing tensors to the shapes a model has by its config, and to those a framework pads them to.
//
// Rows that frameworks add (a padded vocabulary, key-value heads that several tensor-parallel ranks hold) or lose (a
// vocabulary of which only rank 0's part was saved, experts joined into one) are a matter of boxes: a cut drops
// fragments, a repeated row is a fragment with a stride of 0, a row of a donor is a fragment in another checkpoint's
// file. No data moves before the conversion runs; what is looked at here is what a decision needs.
#pragma once

#include <functional>
#include <string>
#include <vector>

#include "lib/base/json.h"
#include "lib/checkpoint/format.h"
#include "lib/engine/run_options.h"
#include "lib/model/family.h"

namespace reshard {

// What may be mended in a source, beside what is harmless: rows of zeros beyond the vocabulary, and copies of heads.
struct Repairs {
  bool vocabulary = false;  // cut rows that are not zeros; take missing ones from the donor
  bool experts = false;     // split matrices that hold the rows of several experts
};

struct RepairOptions {
  const Family* family = nullptr;
  const ModelConfig* config = nullptr;
  Repairs repairs;
  Reader* donor = nullptr;     // another checkpoint, for missing rows; null: none
  bool metadata_only = false;  // decide without looking at data, as for a plan
  std::string spool = ".";
  RunOptions run;
  // Whether the source stores what the view calls so; null: all of it. A tied head may be in the view alone.
  std::function<bool(const std::string& canonical)> is_stored = nullptr;
};

// What was done, for people and for the manifest.
struct RepairResult {
  std::vector<std::string> notes;  // whole sentences
  Json repairs = Json::array();    // {"what": ..., "tensors": [...], ...}
};

// Brings a canonical view, whose tensors are located, to the config's shapes as far as allowed. Errors say which
// --repair would do it, and leave the view as it was. Tensors that do not fit in other ways are not touched. `files` is
// the view's pool.
Result<RepairResult> repair_to_config(Catalog& view, FilePool& files, const RepairOptions& options);

}  // namespace reshard
