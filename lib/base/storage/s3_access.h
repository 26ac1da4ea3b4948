// SPDX-License-Identifier: Apache-2.0
// What is known of the access to a bucket.
#pragma once

#include <ctime>
#include <string>

namespace reshard {

// How requests to an S3 or GCS bucket are sent. Without a key and a token they are anonymous.
struct S3Access {
  std::string key_id, secret, session_token;
  std::string bearer;       // for GCS, instead of the three above
  std::string region;       // empty: unknown
  std::string endpoint;     // "https://host[:port][/path]" without a slash at its end; empty: AWS's own
  std::time_t expires = 0;  // of keys that do; 0: they do not
  std::string source;  // where the key was found, for messages: "AWS_ACCESS_KEY_ID", "profile 'x'"; empty: anonymous
  bool is_anonymous() const { return key_id.empty() && bearer.empty(); }
};

}  // namespace reshard
