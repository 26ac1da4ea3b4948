// SPDX-License-Identifier: Apache-2.0
#include "lib/base/machine.h"

#include <unistd.h>

namespace reshard {

std::string host_name() {
  char name[256] = {};
  return ::gethostname(name, sizeof name - 1) == 0 ? name : "";
}

std::string utc_text(std::time_t seconds, const char* format) {
  std::tm parts{};
  char text[64];
  if (!::gmtime_r(&seconds, &parts) || std::strftime(text, sizeof text, format, &parts) == 0) return {};
  return text;
}

}  // namespace reshard
