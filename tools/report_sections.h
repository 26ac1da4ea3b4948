// SPDX-License-Identifier: Apache-2.0
// The part of a report that is plain HTML: it is read without scripts, and printed.
#pragma once

#include <cmath>
#include <string>
#include <string_view>
#include <utility>

#include "lib/base/json.h"

namespace reshard::tools {

// The layer of a tensor: its name up to the first number ("model.layers.", 3), or without its last word ("model.norm",
// -1).
using Layer = std::pair<std::string, Index>;
Layer layer_of(std::string_view tensor);
std::string layer_name(const Layer& layer);  // "model.layers.3"

// The relative distance |a - b| / |a| of several tensors together.
class RelativeChange {
 public:
  void add(double difference_norm, double a_norm) {
    difference2_ += difference_norm * difference_norm;
    a2_ += a_norm * a_norm;
  }
  double value() const { return difference2_ == 0 ? 0 : std::sqrt(difference2_ / a2_); }

 private:
  double difference2_ = 0, a2_ = 0;
};

// The result of a command in one line.
struct Verdict {
  enum class Kind { kGood, kBad, kNeutral } kind = Kind::kNeutral;
  std::string text;  // "Failed: 2 errors, 0 warnings, 1 note"
};

// Both take the --json of a command ("verify"); page_json(), plan_page_json() and the data of WatchPage for
// inspect, plan and watch.
Verdict verdict_of(std::string_view command, const Json& data);
// Returns the sections, with one empty element for the drawings of the script (id="maps"). Sections that the script
// shows in another way have the class "plain".
std::string report_sections(std::string_view command, const Json& data);

}  // namespace reshard::tools
