// SPDX-License-Identifier: Apache-2.0
// Names of checkpoints that are elsewhere: s3://bucket/key, gs://bucket/key, hf://org/model[@revision][/path],
// https://...
#pragma once

#include <string>
#include <string_view>

namespace reshard {

// Whether a path is a URL of a scheme that reshard reads. Every other text is a path of this machine.
bool is_url(std::string_view path);

// A URL cut in two: `root` is the bucket, repository or host ("s3://bucket"), `key` what is inside it, without slashes
// at its ends ("a/b"). `is_directory`: the URL ends in a slash, so that no object of that name is meant.
struct Url {
  std::string root, key;
  bool is_directory = false;
};
Url parse_url(std::string_view url);

// Percent-encodes all but letters, digits and -_.~ (RFC 3986), and slashes where `keep_slashes`.
std::string percent_encode(std::string_view text, bool keep_slashes);
std::string percent_decode(std::string_view text);  // what is no escape stays as it is

// Without blanks and line ends around it.
std::string_view trimmed(std::string_view text);

// "https://host:8000/a?b" -> "https", "host:8000", "/a?b". Other texts give empty views.
struct HttpUrl {
  std::string_view scheme, host, target;
};
HttpUrl split_http_url(std::string_view url);

}  // namespace reshard
