// SPDX-License-Identifier: Apache-2.0
// Writing to an object store. An object that is uploaded in parts is invisible until its upload is completed.
#pragma once

#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "lib/base/cursor.h"
#include "lib/base/result.h"

namespace reshard {

inline constexpr Index kMostParts = 10'000;              // of an upload
inline constexpr Index kLeastPart = Index{5} << 20;      // bytes of a part, except the last of an upload
inline constexpr Index kLargestPart = Index{5} << 30;    // bytes of a part
inline constexpr Index kLargestObject = Index{5} << 40;  // bytes

struct StoredPart {
  int number = 0;  // from 1
  Index size = 0;
  std::string etag;
};

// Thread-safe. Each part is sent with its MD5, so the store refuses damaged bytes.
class ObjectWriter {
 public:
  virtual ~ObjectWriter() = default;
  // Writes a whole object, replacing the one with this key. Returns its ETag.
  virtual Result<std::string> put(const std::string& key, Bytes body) = 0;
  // Begins an upload in parts. Returns its id.
  virtual Result<std::string> begin_upload(const std::string& key) = 0;
  // Writes a part, replacing the one with this number. `sum` is the MD5 of its bytes. Returns its ETag, which usually
  // is etag_of_sum(sum). Fails if the store states that it has other bytes.
  virtual Result<std::string> put_part(const std::string& key, const std::string& upload, int number, Bytes bytes,
                                       const std::string& sum) = 0;
  // Returns the parts of an upload by number; nothing if there is no such upload.
  virtual Result<std::optional<std::vector<StoredPart>>> parts(const std::string& key, const std::string& upload) = 0;
  // Makes the object of the parts 1, 2, ... with these ETags. Returns its ETag; nothing if there is no such upload,
  // which is also the answer to a second try if the reply to the first was lost.
  virtual Result<std::optional<std::string>> complete_upload(const std::string& key, const std::string& upload,
                                                             const std::vector<std::string>& etags) = 0;
  // Drops an upload and its parts. No such upload is no error.
  virtual Status abort_upload(const std::string& key, const std::string& upload) = 0;
  // Removes an object. No such object is no error.
  virtual Status remove(const std::string& key) = 0;
};

// Returns the ETag that S3 gives to bytes with this MD5: its digits in quotes.
std::string etag_of_sum(std::string_view sum);
// Returns the ETag that S3 gives to an object of parts with these ETags; empty if one of them is no MD5.
std::string etag_of_parts(const std::vector<std::string>& etags);
// Returns whether an ETag has the form of those that S3 computes from the bytes. Stores with encryption have others.
bool is_md5_etag(std::string_view etag);

}  // namespace reshard
