// SPDX-License-Identifier: Apache-2.0
// Implements http.h in a build without libcurl: every request fails (unsupported).
#include "lib/base/storage/http.h"

namespace reshard {

Status open_http() {
  return unsupported("reshard was built without libcurl, which reads URLs: build it with RESHARD_CURL=ON");
}

Result<std::string> http_version() { return open_http().error(); }

std::vector<std::string> http_files() { return {}; }

HttpOutcome send_once(const HttpRequest&) { return HttpFailure{open_http().error(), false}; }

}  // namespace reshard
