// SPDX-License-Identifier: Apache-2.0
// The HTML page of a run that `reshard watch` converts: its steps, their sizes, and how far each layer moved between
// two steps.
//
// DST/.reshard-watch-page.json keeps what was measured, because outputs and sources may be removed later:
//
//   {"steps": {"step-200": {"source_files": 5, "source_bytes": N, "output_files": 3, "output_bytes": N,
//                           "converted": 1790000000, "seconds": 1.5, "since": "step-100", "changed": 0.01,
//                           "remark": "", "moved": {"": 0.02, "model.layers.0": 0.03}}}}
//
// "changed" is the share of elements that differ; "moved" has relative distances |new - old| / |old|, of the whole
// model under "".
#pragma once

#include <map>
#include <string>
#include <vector>

#include "lib/base/json.h"
#include "tools/job_options.h"

namespace reshard::tools {

// A step as the page shows it.
struct WatchedStep {
  std::string name, source, output;
  Index number = -1;  // -1: there is none
  enum class State { kConverted, kRemoved, kFailed, kIncomplete, kSkipped } state = State::kSkipped;
  std::string remark = {};  // why it failed
};

class WatchPage {
 public:
  // Reads what earlier processes measured. `options` must outlive the result.
  static Result<WatchPage> open(const std::string& page, const std::string& root, const ConvertOptions& options);

  bool knows(const std::string& step) const { return facts_.find(step) != nullptr; }
  // Measures a converted step and its distance from an earlier one, whose name and path are empty if there is none.
  // `seconds`: its conversion took; negative: unknown. Two steps that cannot be compared are a remark, not an error.
  Status measure(const WatchedStep& step, double seconds, const std::string& before, const std::string& before_path);
  Status write(const std::string& run, const std::vector<WatchedStep>& steps) const;

 private:
  explicit WatchPage(const ConvertOptions& options) : options_(&options) {}
  Status compare(const std::string& before_path, const std::string& output, Json& facts) const;
  Json data(const std::string& run, const std::vector<WatchedStep>& steps) const;

  const ConvertOptions* options_;
  std::string page_, record_, root_;
  Json facts_ = Json::object();  // by step
};

}  // namespace reshard::tools
