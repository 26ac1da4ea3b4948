// SPDX-License-Identifier: Apache-2.0
// Requests to a bucket of S3 and what speaks its protocol: MinIO, Ceph, Swift, R2, and Google's XML interface.
#pragma once

#include <map>
#include <mutex>
#include <string>

#include "lib/base/storage/credentials.h"
#include "lib/base/storage/http.h"

namespace reshard {

// Signs and sends requests, and explains their errors. Thread-safe.
class BucketClient {
 public:
  using Query = std::map<std::string, std::string>;  // in the order in which it is signed

  BucketClient(std::string root, std::string name, S3Access access)
      : root_(std::move(root)), name_(std::move(name)), access_(std::move(access)) {}

  const std::string& root() const { return root_; }  // "s3://bucket"

  struct Request {
    std::string method = "GET";
    std::string key = "";
    Query query = {};
    HttpHeaders headers = {};
    MutableBytes into = {};  // of a range
    Bytes body = {};
  };
  // Sends a request, with retries. If the bucket turns out to be in another region, sends it there from now on.
  Result<HttpReply> send(const Request& request, const ShouldRetry& should_retry = nullptr);

  // Returns S3's code in an error's body; empty if there is none.
  static std::string code_of(const HttpReply& reply);
  // Explains a reply that is not a success.
  Error error_of(const HttpReply& reply) const;
  // For a denied access: returns which identity lacks the right, and what to do.
  std::string by_whom() const;

 private:
  bool is_part_of_host(const S3Access& access) const;
  S3Access access() const;
  void refresh();
  Result<std::string> region_after(const HttpReply& reply, const std::string& used);
  HttpRequest http_request(const Request& request, std::string_view body_sum, const S3Access& access) const;
  std::string missing_credentials() const;

  const std::string root_, name_;
  mutable std::mutex mutex_;
  S3Access access_;  // its region under the mutex
};

}  // namespace reshard
