// What there is to say of a conversion's steps.
#pragma once

#include <string>
#include <vector>

#include "lib/base/json.h"
#include "lib/layout/box.h"

namespace reshard {

// State of the source that the output does not get.
struct LeftOut {
  std::string what;  // "optimizer", "tied head"
  Index tensors = 0;
  Index objects = 0;
  Index bytes = 0;
  std::vector<std::string> names = {};  // where the user should know each
};

// What there is to say of the steps, to the user and in the manifest. Steps add to it, none reads it.
struct ConversionNotes {
  std::vector<std::string> warnings;  // whole sentences
  std::vector<LeftOut> left_out;
  Json repairs = Json::array();
};

}  // namespace reshard
