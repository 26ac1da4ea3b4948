// SPDX-License-Identifier: Apache-2.0
// http.h in a build without libcurl.
#include "lib/base/storage/http.h"

namespace reshard {

Status open_http() {
  return unsupported("this reshard was built without libcurl, which reads URLs: build it with RESHARD_CURL=ON");
}

std::vector<std::string> http_files() { return {}; }

HttpOutcome send_once(const HttpRequest&) { return HttpFailure{open_http().error(), false}; }

}  // namespace reshard
