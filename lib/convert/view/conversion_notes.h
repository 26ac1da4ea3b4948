// SPDX-License-Identifier: Apache-2.0
// Notes about the steps of a conversion.
#pragma once

#include <string>
#include <vector>

#include "lib/base/json.h"
#include "lib/layout/box.h"

namespace reshard {

// State of the source that is not written to the output.
struct OmittedState {
  std::string what;  // "optimizer", "tied head"
  Index tensors = 0;
  Index objects = 0;
  Index bytes = 0;
  std::vector<std::string> names = {};  // set if the user should see each name
};

// Notes of all steps, for the user and the manifest. Steps only add to them.
struct ConversionNotes {
  std::vector<std::string> warnings;  // whole sentences
  std::vector<std::string> facts;     // whole sentences: what was checked and is right
  std::vector<OmittedState> left_out;
  Json repairs = Json::array();
  Json arithmetic = Json::array();  // how values were changed, for the manifest
};

}  // namespace reshard
