//go:build !tls

package main

import (
	"github.com/apache/rocketmq-client-go/v2/consumer"
	"github.com/apache/rocketmq-client-go/v2/producer"
)

// The release 2.1.2 of the client speaks no TLS.
var (
	consumersConnect []consumer.Option
	producersConnect []producer.Option
)
