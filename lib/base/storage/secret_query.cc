// SPDX-License-Identifier: Apache-2.0
#include "lib/base/storage/secret_query.h"

#include <map>
#include <mutex>

#include "lib/base/storage/url.h"

namespace reshard {
namespace {

struct SecretQueries {
  std::mutex mutex;
  std::map<std::string, std::string> of_urls;
  static SecretQueries& of_process() {
    static auto* const all = new SecretQueries();
    return *all;
  }
};

}  // namespace

std::string without_secret_query(const std::string& url) {
  const std::size_t mark = url.find('?');
  if (mark == std::string::npos || !(url.starts_with("https://") || url.starts_with("http://"))) return url;
  const Url parsed = parse_url(url.substr(0, mark));
  const std::string plain = parsed.root + "/" + parsed.key;
  SecretQueries& queries = SecretQueries::of_process();
  const std::lock_guard lock(queries.mutex);
  queries.of_urls.insert_or_assign(plain, url.substr(mark));
  return plain;
}

std::string secret_query_of(const std::string& url) {
  SecretQueries& queries = SecretQueries::of_process();
  const std::lock_guard lock(queries.mutex);
  const auto at = queries.of_urls.find(url);
  return at == queries.of_urls.end() ? "" : at->second;
}

}  // namespace reshard
