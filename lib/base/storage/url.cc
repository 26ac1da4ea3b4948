// SPDX-License-Identifier: Apache-2.0
#include "lib/base/storage/url.h"

#include <algorithm>
#include <cctype>

#include "lib/base/text.h"

namespace reshard {
namespace {

struct Scheme {
  std::string_view start;
  int root_parts;  // components after the scheme that form the root
};
constexpr Scheme kSchemes[] = {{"s3://", 1}, {"gs://", 1}, {"hf://", 2}, {"https://", 1}, {"http://", 1}};

const Scheme* scheme_of(std::string_view path) {
  for (const Scheme& scheme : kSchemes)
    if (path.starts_with(scheme.start)) return &scheme;
  return nullptr;
}

std::string_view without_slashes(std::string_view text) {
  while (text.ends_with('/')) text.remove_suffix(1);
  while (text.starts_with('/')) text.remove_prefix(1);
  return text;
}

int hex_value(char c) {
  if (c >= '0' && c <= '9') return c - '0';
  const char lower = static_cast<char>(c | 0x20);
  return lower >= 'a' && lower <= 'f' ? lower - 'a' + 10 : -1;
}

}  // namespace

bool is_url(std::string_view path) { return scheme_of(path) != nullptr; }

bool is_bucket_url(std::string_view path) { return path.starts_with("s3://") || path.starts_with("gs://"); }

bool lists_hidden(std::string_view path) { return !path.starts_with("http://") && !path.starts_with("https://"); }

Url parse_url(std::string_view url) {
  const Scheme* const scheme = scheme_of(url);
  if (!scheme) return {};
  std::size_t end = scheme->start.size();
  const std::string_view rest = url.substr(end);
  const bool has_kind = scheme->start == "hf://" && (rest.starts_with("datasets/") || rest.starts_with("spaces/"));
  for (int part = 0; part < scheme->root_parts + (has_kind ? 1 : 0); ++part)
    end = std::min(url.find('/', part == 0 ? end : end + 1), url.size());
  if (scheme->start == "hf://" && url.substr(0, end).ends_with("@refs"))  // "refs/pr/1" is one revision
    for (int part = 0; part < 2; ++part) end = std::min(url.find('/', std::min(end + 1, url.size())), url.size());
  return {std::string(url.substr(0, end)), std::string(without_slashes(url.substr(end))),
          end < url.size() && url.ends_with('/')};
}

bool is_usable_key(std::string key) {
  std::replace(key.begin(), key.end(), '\\', '_');
  return is_safe_relative_path(key);
}

std::string percent_encode(std::string_view text, bool keep_slashes) {
  constexpr char kDigits[] = "0123456789ABCDEF";
  std::string out;
  for (const char c : text) {
    const auto byte = static_cast<unsigned char>(c);
    const bool is_plain = (byte < 0x80 && std::isalnum(byte)) ||
                          (c != '\0' && std::string_view("-_.~").find(c) != std::string_view::npos);
    if (is_plain || (c == '/' && keep_slashes)) {
      out += c;
    } else {
      out += '%';
      out += kDigits[byte >> 4];
      out += kDigits[byte & 15];
    }
  }
  return out;
}

std::string percent_decode(std::string_view text) {
  std::string out;
  for (std::size_t i = 0; i < text.size(); ++i) {
    const int high = text[i] == '%' && i + 2 < text.size() ? hex_value(text[i + 1]) : -1;
    const int low = high >= 0 ? hex_value(text[i + 2]) : -1;
    out += low >= 0 ? static_cast<char>(high * 16 + low) : text[i];
    if (low >= 0) i += 2;
  }
  return out;
}

std::string_view trimmed(std::string_view text) {
  const std::size_t begin = text.find_first_not_of(" \t\r\n");
  return begin == std::string_view::npos ? "" : text.substr(begin, text.find_last_not_of(" \t\r\n") - begin + 1);
}

HttpUrl split_http_url(std::string_view url) {
  const std::size_t colon = url.find("://");
  if (colon == std::string_view::npos) return {};
  const std::string_view rest = url.substr(colon + 3);
  const std::size_t slash = std::min(rest.find_first_of("/?"), rest.size());
  return {url.substr(0, colon), rest.substr(0, slash), rest.substr(slash)};
}

}  // namespace reshard
