// SPDX-License-Identifier: Apache-2.0
// URLs of checkpoints: s3://bucket/key, gs://bucket/key, hf://org/model[@revision][/path],
// https://...
#pragma once

#include <string>
#include <string_view>

namespace reshard {

// Returns whether a path is a URL of a supported scheme. Every other text is a local path.
bool is_url(std::string_view path);

// Returns whether outputs can be written to a URL: a bucket's.
bool is_bucket_url(std::string_view path);

// Returns whether listings of a place contain all names. Listing pages of web servers usually leave out those that
// begin with a dot, which are looked up by name.
bool lists_hidden(std::string_view path);

// A parsed URL. `root` is the bucket, repository or host ("s3://bucket"), `key` the path inside it without slashes at
// its ends ("a/b"). `is_directory` is set if the URL ends in a slash, so that it cannot mean an object.
struct Url {
  std::string root, key;
  bool is_directory = false;
};
Url parse_url(std::string_view url);

// Returns whether a key that a store lists is a path without empty components, "." and "..". Unlike in paths that
// metadata contains, a backslash is a character like any other.
bool is_usable_key(std::string key);

// Percent-encodes all characters except letters, digits and -_.~ (RFC 3986) and, with `keep_slashes`, slashes.
std::string percent_encode(std::string_view text, bool keep_slashes);
std::string percent_decode(std::string_view text);  // leaves invalid escapes unchanged

// Returns the text without spaces and line ends at its ends.
std::string_view trimmed(std::string_view text);

// Splits "https://host:8000/a?b" into "https", "host:8000" and "/a?b". Other texts give empty views.
struct HttpUrl {
  std::string_view scheme, host, target;
};
HttpUrl split_http_url(std::string_view url);

}  // namespace reshard
