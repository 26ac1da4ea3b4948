// SPDX-License-Identifier: Apache-2.0
// What `reshard watch` remembers of a run between two processes, DST/.reshard-watch.json:
//
//   {"steps": {"step-200": {"source": "/run/step-200", "proven": true, "then": false}},
//    "started": {"step-300": "/run/step-300"},
//    "files": {"step-200": {"path": "/model.safetensors", "size": N, "mtime_ns": N}}}
//
// "without_optimizer", "rewriting" and "replaced" of a step are there if they are true.
#pragma once

#include <map>
#include <string>
#include <string_view>

#include "lib/base/checked.h"
#include "lib/base/result.h"

namespace reshard::tools {

// A step that was converted.
struct StepRecord {
  std::string source;
  bool proven = false;          // this record's watch has converted it
  bool then_succeeded = false;  // --then has succeeded
  // --without-optimizer-after has rewritten the source, or it had no optimizer.
  bool lacks_optimizer = false;
  bool rewriting = false;  // the source is being rewritten without its optimizer
  bool replaced = false;   // the source is another checkpoint now, which was not converted
};

// One data file of a step's source at its conversion.
struct DataFile {
  std::string path;  // relative to the source; empty: the source is the file
  Index size = 0, mtime_ns = 0;
};

// The keys are names of steps.
struct WatchRecord {
  std::string path;
  std::map<std::string, StepRecord> steps;
  std::map<std::string, std::string> started;  // the sources of steps whose conversion has started
  std::map<std::string, DataFile> files;       // of steps that were converted or started

  // Reads the record of a directory of outputs. Without one, the result is empty.
  static Result<WatchRecord> read(const std::string& directory);
  // Replaces the file atomically.
  Status write() const;

  bool has(const std::string& step) const { return steps.contains(step); }
  // Returns null for a step that was not converted.
  StepRecord* find(const std::string& step);
  const StepRecord* find(const std::string& step) const;
};

// Returns whether a file of this name in DST is a record, of this or of another kind, that a process did not finish
// writing.
bool is_unfinished_record(std::string_view name);

}  // namespace reshard::tools
