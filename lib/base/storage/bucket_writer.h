// SPDX-License-Identifier: Apache-2.0
// Writing to a bucket of S3, or of what speaks its protocol.
#pragma once

#include <string>
#include <vector>

#include "lib/base/storage/bucket_client.h"
#include "lib/base/storage/object_writer.h"

namespace reshard {

class BucketWriter : public ObjectWriter {
 public:
  explicit BucketWriter(BucketClient& client) : client_(client) {}

  Result<std::string> put(const std::string& key, Bytes body) override;
  Result<std::string> begin_upload(const std::string& key) override;
  Result<std::string> put_part(const std::string& key, const std::string& upload, int number, Bytes bytes,
                               const std::string& sum) override;
  Result<std::optional<std::vector<StoredPart>>> parts(const std::string& key, const std::string& upload) override;
  Result<std::optional<std::string>> complete_upload(const std::string& key, const std::string& upload,
                                                     const std::vector<std::string>& etags) override;
  Status abort_upload(const std::string& key, const std::string& upload) override;
  Status remove(const std::string& key) override;

 private:
  Result<std::string> put_bytes(BucketClient::Request request, const std::string& sum);
  Error error_of(const HttpReply& reply, const std::string& key) const;

  BucketClient& client_;
};

}  // namespace reshard
